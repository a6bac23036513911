"""One training run with everything that can happen to it, for a trainer of any number of processes.

As a program, under torchrun, it does the runs on several ranks: `training_run.py DIRECTORY OBJECTIVE...`. The directory holds the
inputs and takes the results.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[3]))

from drafter.artifact import load_draft
from drafter.head import Head
from drafter.target import TargetParts, load_target_parts
from drafter.vocabulary import DraftVocabulary
from learner.config import TrainSettings
from learner.newton_schulz import orthogonalise_plainly
from learner.request import CapturedRequest
from learner.trainer import Diverged, Trainer
from wire.store import DraftStore

Found = dict[str, Tensor]
CLIP_NORMS = {"kl": 8.0, "aurora": 8.5, "reinforce": 8.0, "lk": 7.6}
"""By objective, each amid the gradient norms of its run, so that a gradient of another scale trains otherwise."""


def settings_of(objective: str) -> TrainSettings:
    values = {"objective": objective, "clip_norm": CLIP_NORMS[objective], "noise": 0.01}
    common = {"bfloat16": False, "muon_rate": 0.05, "average_decay": 0.5, "exploding_factor": 1e9}
    return TrainSettings.build(common | values, source="test")


def exact_muon():
    """Muon by its float64 reference. In bfloat16 a sum in another order, in the last bit, may round to a direction 1 % away."""
    return patch("learner.optimiser.orthogonalise", lambda matrix: orthogonalise_plainly(matrix).float())


def other_head(target: TargetParts) -> Head:
    """Of another vocabulary than the draft begins with."""
    return Head.of_target(DraftVocabulary(torch.arange(10, 58), target.head_VD.shape[0]), target.head_VD)


def train(trainer: Trainer, target: TargetParts, state: dict[str, Tensor], requests: Sequence[CapturedRequest]) -> Found:
    """What came of it, by name: losses, agreement, whole states and candidates."""
    found: Found = {}
    losses: list[float] = []
    divergences: list[float] = []

    def step(batch: Sequence[CapturedRequest], rate_share: float = 1.0) -> None:
        result = trainer.step(batch, rate_share)
        found[f"agreement.{len(losses)}"] = torch.tensor(result.agreement)
        losses.append(result.loss)
        divergences.append(result.kl)

    trainer.load(state)
    for rate_share in (1.0, 0.5, 0.25):
        step(requests, rate_share)
    found |= {f"candidate.{name}": value for name, value in trainer.candidate().core.state_dict().items()}
    step(requests[:1])  # nothing for the second rank
    trainer.forget([request.key for request in requests])
    step(requests[1:])
    before = trainer.tensors()
    for spoil in (_not_a_number, _no_such_token):
        found[spoil.__name__] = torch.tensor(float(_fails(trainer, [*requests, spoil(requests[1])])))
    after = trainer.tensors()
    found["moved_by_failures"] = torch.tensor(max(float((after[name] - before[name]).abs().max()) for name in before))
    trainer.load(state)  # back to the last good state, as a learner goes then
    trainer.optimiser.rate_scale = 0.5
    step(requests)
    trainer.set_head(other_head(target))
    step(requests)
    found |= {f"state.{name}": value for name, value in trainer.tensors().items()}
    step(requests)
    found |= {"losses": torch.tensor(losses), "divergences": torch.tensor(divergences)}
    return found


def _not_a_number(request: CapturedRequest) -> CapturedRequest:
    rows = replace(request.rows, aux_TX=torch.full_like(request.rows.aux_TX, float("nan")))
    return replace(request, key="nan", rows=rows)


def _no_such_token(request: CapturedRequest) -> CapturedRequest:
    rows = replace(request.rows, next_tokens_T=request.rows.next_tokens_T + 10_000)
    return replace(request, key="token", rows=rows)


def _fails(trainer: Trainer, batch: Sequence[CapturedRequest]) -> int:
    """1 for a divergence, 2 for a batch that cannot be computed, 0 for a step that was made."""
    try:
        trainer.step(batch)
    except Diverged:
        return 1
    except (IndexError, RuntimeError):
        return 2
    return 0


def main(directory: Path, objectives: Sequence[str]) -> None:
    from torch import distributed as dist

    from learner.follow import follow
    from learner.lead import LeadingTrainer
    from learner.orders import Learn, OrderChannel, Stop, decode
    from learner.sharded import ShardedRanks

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    channel = OrderChannel()
    target = load_target_parts(directory / "tiny-target")
    for objective in objectives:
        ranks, settings = ShardedRanks(), settings_of(objective)
        if ranks.rank > 0:
            follow(target, settings, ranks, channel)
            continue
        store = DraftStore(directory / "state")
        order = decode(torch.frombuffer(bytearray((directory / "requests").read_bytes()), dtype=torch.uint8))
        assert isinstance(order, Learn)
        draft = load_draft(store, 0, store.manifest(0).spec, target)
        trainer = LeadingTrainer(draft, target, settings, ranks, channel)
        found = train(trainer, target, load_file(directory / f"start.{objective}.safetensors"), order.requests)
        save_file(found, directory / f"found.{objective}.safetensors")
        for rank in range(1, ranks.size):
            channel.send(Stop(), rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    with exact_muon():
        main(Path(sys.argv[1]), sys.argv[2:])
