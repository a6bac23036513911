from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent))

import training_run

from drafter.artifact import load_draft
from drafter.credit import Outcome
from learner.lead import deal
from learner.orders import Learn, decode, encode
from learner.request import CapturedRequest
from learner.sharded import _owned
from learner.trainer import Trainer
from wire.store import DraftStore

PROGRAM = Path(training_run.__file__)


def torchrun(*arguments: str, num_ranks: int = 2) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    return [sys.executable, *launcher, *arguments]


@pytest.fixture
def new_trainer(state_dir, spec, target):
    def build(objective: str) -> Trainer:
        return Trainer(load_draft(DraftStore(state_dir), 0, spec, target), target, training_run.settings_of(objective))

    return build


@pytest.fixture
def requests(make_request):
    """Of different lengths, with verdicts; each proposal is what follows in the text, or else the token after it."""

    def build(n: int) -> CapturedRequest:
        request = make_request(f"r{n}", first=n, prompt=3 + n, total=12 + 3 * n)
        tokens = request.rows.next_tokens_T.tolist()
        outcomes = {p: Outcome((tokens[p + 1], tokens[p + 2], tokens[p + 3] + 1), (p + n) % 3, 0) for p in range(3 + n, 8 + n)}
        return replace(request, outcomes=outcomes)

    return [build(n) for n in range(4)]


@pytest.fixture
def runs(tmp_path, new_trainer, requests, target):
    """By objective, the same run on one process and on two."""
    starts = {}
    for objective in training_run.CLIP_NORMS:
        trainer = new_trainer(objective)
        for _ in range(3):
            trainer.step(requests)
        starts[objective] = trainer.tensors()
        save_file(starts[objective], tmp_path / f"start.{objective}.safetensors")
    (tmp_path / "requests").write_bytes(encode(Learn(tuple(requests), 1.0, 1.0, 1.0, ())))
    done = subprocess.run(
        torchrun(str(PROGRAM), str(tmp_path), *starts),
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = {}
    for objective, start in starts.items():
        with training_run.exact_muon():
            alone = training_run.train(new_trainer(objective), target, start, requests)
        found[objective] = (alone, load_file(tmp_path / f"found.{objective}.safetensors"))
    return found


def test_two_ranks_train_as_one_process_does(runs, new_trainer, requests, target):
    untrained = new_trainer("kl").core.fc.weight.detach()
    for objective, (alone, together) in runs.items():
        assert alone.keys() == together.keys()
        assert alone["_not_a_number"] == 1
        assert alone["_no_such_token"] == 2
        assert alone["moved_by_failures"] == 0
        assert float((alone["state.core.fc.weight"] - untrained).abs().max()) > 0.01
        for name, value in alone.items():
            torch.testing.assert_close(
                together[name], value, rtol=1e-4, atol=1e-5, msg=lambda text, name=f"{objective} {name}": f"{name}: {text}"
            )

        trainer = new_trainer(objective)  # what two ranks saved goes on in one process
        trainer.load({name.removeprefix("state."): value for name, value in together.items() if name.startswith("state.")})
        trainer.set_head(training_run.other_head(target))
        assert trainer.step(requests).loss == pytest.approx(float(together["losses"][-1]), rel=1e-5, abs=1e-6)


def test_shares_are_of_much_the_same_size_and_the_first_rank_always_has_one(make_request):
    requests = [make_request(f"r{n}", total=total) for n, total in enumerate([50, 30, 20, 10])]
    assert [[r.rows.positions_T.numel() for r in share] for share in deal(requests, 2)] == [[50, 10], [30, 20]]
    assert [len(share) for share in deal(requests[:1], 3)] == [1, 0, 0]


def test_an_order_arrives_as_it_was_sent(make_request):
    request = replace(make_request(), outcomes={5: Outcome((1, 2), 1, 3)})
    request = replace(request, rows=replace(request.rows, aux_TX=request.rows.aux_TX.bfloat16()))
    sent = Learn((request, request), 0.0, 0.5, 0.25, ("gone",))
    arrived = decode(torch.frombuffer(bytearray(encode(sent)), dtype=torch.uint8))
    assert isinstance(arrived, Learn)
    assert (arrived.weight, arrived.rate_share, arrived.rate_scale, arrived.forgotten) == (0.0, 0.5, 0.25, ("gone",))
    for found in arrived.requests:
        assert (found.key, found.outcomes, found.rows.temperature) == (request.key, request.outcomes, 0.0)
        for name in ("positions_T", "next_tokens_T", "aux_TX", "hidden_TD"):
            value = getattr(request.rows, name)
            assert getattr(found.rows, name).dtype == value.dtype
            assert torch.equal(getattr(found.rows, name), value)


def test_each_matrix_has_one_owner_and_the_work_is_shared():
    shapes = [torch.Size(shape) for shape in [(576, 1152), (192, 1152), (576, 576), (1536, 576), (1536, 576), (576, 1728)]]
    owned = _owned(shapes, 2)
    assert sorted(index for indices in owned for index in indices) == list(range(6))
    costs = [sum(shapes[i].numel() * min(shapes[i]) for i in indices) for indices in owned]
    assert max(costs) < 1.5 * min(costs)
