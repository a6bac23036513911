from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from drafter.batch import NoAnchor, pack
from drafter.create import random_draft
from drafter.credit import Outcome
from drafter.draft import Draft
from drafter.head import Head
from drafter.target import TargetParts
from drafter.vocabulary import choose_vocabulary
from learner.config import TrainSettings
from learner.evaluate import Evaluator, simulated_al
from learner.request import CapturedRequest
from learner.trainer import Diverged, Trainer, exploding_kl


@pytest.fixture
def trainer(spec, target_dir, target):
    return Trainer(random_draft(spec, target_dir, target, seed=0), target, TrainSettings(bfloat16=False, muon_rate=0.05))


@pytest.fixture
def evaluator(target):
    return Evaluator(target, 3, dtype=torch.float32, max_context_rows=64)


def test_training_raises_al_on_requests_never_seen(trainer, evaluator, make_request):
    unseen = [make_request(f"u{n}", first=n) for n in (2, 5, 9)]
    seen = [make_request(f"s{n}", first=n) for n in range(0, 40, 3) if n not in (2, 5, 9)]
    before = simulated_al(list(evaluator.scores(trainer.candidate(), unseen).values()))
    results = [trainer.step(seen) for _ in range(60)]
    after = simulated_al(list(evaluator.scores(trainer.candidate(), unseen).values()))
    assert results[-1].loss < results[0].loss / 2
    assert after > before + 0.3
    assert trainer.num_steps == 60
    assert trainer.num_tokens_seen == 60 * sum(request.num_tokens for request in seen)


def verified(request: CapturedRequest, draft: Draft, target: TargetParts) -> CapturedRequest:
    """The request as if this draft had proposed from every position of it."""
    batch = pack([request.rows], 3)
    with torch.no_grad():
        outputs = draft.core.unroll(batch, target.embedding_VD, 3)
    proposed_KA = torch.stack([draft.head.vocabulary.ids_U[(each @ draft.head.weight_UD.T).argmax(-1)] for each in outputs])
    emitted_KA = torch.stack([batch.next_tokens_T[batch.target_rows(depth)] for depth in range(3)])
    num_accepted_A = (proposed_KA == emitted_KA).int().cumprod(0).sum(0)
    anchors = zip(batch.positions_T[batch.anchors_A].tolist(), proposed_KA.T.tolist(), num_accepted_A.tolist(), strict=True)
    return replace(request, outcomes={at: Outcome(tuple(ids), accepted, 0) for at, ids, accepted in anchors})


@pytest.mark.parametrize(
    "values",
    [
        {"objective": "kl"},
        {"objective": "kl+ce"},
        {"objective": "kl+ce", "hard_weight": 1.0},
        {"objective": "aurora", "lambda_discard": 1.0},
        {"objective": "aurora", "discard_top_k": 0},
        {"objective": "reinforce"},
        {"objective": "reinforce", "kl_weight": 0.0},
        {"objective": "tv"},
        {"objective": "lk"},
    ],
    ids=str,
)
def test_every_objective_raises_al_on_requests_never_seen(spec, target_dir, target, evaluator, make_request, values):
    settings = TrainSettings(bfloat16=False, muon_rate=0.05, **values)
    trainer = Trainer(random_draft(spec, target_dir, target, seed=0), target, settings)
    unseen = [make_request(f"u{n}", first=n) for n in (2, 5, 9)]
    seen = [make_request(f"s{n}", first=n) for n in range(0, 40, 3) if n not in (2, 5, 9)]

    def al() -> float:
        return simulated_al(list(evaluator.scores(trainer.candidate(), unseen).values()))

    before = al()
    for _ in range(60):
        trainer.step([verified(request, Draft(trainer.core, trainer.head), target) for request in seen])
    print(values, before, al())
    assert al() > before + 0.3


def test_the_same_seed_trains_the_same(spec, target_dir, target, make_request):
    def losses() -> list[float]:
        trainer = Trainer(random_draft(spec, target_dir, target, seed=0), target, TrainSettings())
        return [trainer.step([make_request()]).loss for _ in range(3)]

    assert losses() == losses()


def test_a_broken_sample_diverges_before_any_weight_changes(trainer, make_request):
    request = make_request()
    request.rows.aux_TX[3] = float("nan")
    before = {name: value.clone() for name, value in trainer.core.state_dict().items()}
    with pytest.raises(Diverged, match="loss is nan"):
        trainer.step([request])
    assert all(torch.equal(before[name], value) for name, value in trainer.core.state_dict().items())


def test_an_exploding_loss_diverges(trainer, make_request):
    for _ in range(25):
        trainer.step([make_request()])
    with torch.no_grad():
        trainer.core.norm.weight.mul_(-100)
    with pytest.raises(Diverged, match="its mean is"):
        trainer.step([make_request()])


def test_a_shift_of_domain_is_no_explosion_and_knowing_less_than_nothing_is():
    limit = exploding_kl(0.4, 3.0, 8192)
    assert 6.0 < limit < 10.0
    assert exploding_kl(8.0, 3.0, 8192) == 24.0


def test_a_restored_state_trains_on_as_if_nothing_happened(trainer, make_request):
    trainer.step([make_request()])
    state = trainer.tensors()
    expected = [trainer.step([make_request()]).loss for _ in range(3)]
    trainer.load(state)
    assert [trainer.step([make_request()]).loss for _ in range(3)] == expected


def test_another_vocabulary_keeps_the_core_and_reteaches(trainer, target, make_request):
    trainer.step([make_request()])
    core = {name: value.clone() for name, value in trainer.core.state_dict().items()}
    trainer.set_head(Head.of_target(choose_vocabulary(torch.arange(64.0), [], 48), target.head_VD))
    assert all(torch.equal(core[name], value) for name, value in trainer.core.state_dict().items())
    assert trainer.step([make_request()]).loss > 0
    assert trainer.candidate().head.vocabulary.sha256 == trainer.head.vocabulary.sha256


def test_a_request_without_anchor_is_left_out(trainer, make_request):
    assert trainer.step([make_request(), make_request("e.r1", prompt=16)]).num_tokens == make_request().num_tokens
    with pytest.raises(NoAnchor, match="no request"):
        trainer.step([make_request("e.r2", prompt=16)])


def test_candidate_has_the_precision_it_is_served_with(spec, target_dir, target, make_request):
    import msgspec

    served = msgspec.structs.replace(spec, dtype="bfloat16")
    trainer = Trainer(random_draft(served, target_dir, target, seed=0), target, TrainSettings())
    weight = trainer.candidate().core.fc.weight
    assert torch.equal(weight, weight.bfloat16().float())
    assert not torch.equal(weight, trainer.core.fc.weight)


def test_candidate_is_the_average_of_the_steps(spec, target_dir, target, make_request):
    settings = TrainSettings(bfloat16=False, average_decay=0.5)
    trainer = Trainer(random_draft(spec, target_dir, target, seed=0), target, settings)
    expected = trainer.core.fc.weight.detach().clone()
    for step in range(1, 4):
        trainer.step([make_request()])
        decay = min(0.5, step / (step + 9))
        expected = decay * expected + (1 - decay) * trainer.core.fc.weight.detach()
    torch.testing.assert_close(trainer.candidate().core.fc.weight, expected)
