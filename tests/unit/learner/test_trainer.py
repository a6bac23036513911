from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from drafter.batch import NoAnchor, pack
from drafter.create import random_draft
from drafter.credit import Outcome
from drafter.draft import Draft
from drafter.head import Head
from drafter.objectives import OBJECTIVES, make_objective
from drafter.objectives.base import Objective
from drafter.target import TargetParts
from drafter.vocabulary import choose_vocabulary
from learner.config import TrainSettings
from learner.evaluate import Evaluator, simulated_al
from learner.request import CapturedRequest
from learner.trainer import Diverged, Trainer, exploding_kl
from wire.errors import ConfigError


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


NEED_A_START = ({"objective": "reinforce", "kl_weight": 0.0}, {"objective": "tv"})
"""From a random draft nothing is accepted and nothing overlaps: neither has a gradient worth the name."""


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
    def train(**values) -> Trainer:
        draft = random_draft(spec, target_dir, target, seed=0)
        return Trainer(draft, target, TrainSettings(bfloat16=False, muon_rate=0.05, **values))

    trainer = train(**values)
    unseen = [make_request(f"u{n}", first=n) for n in (2, 5, 9)]
    seen = [make_request(f"s{n}", first=n) for n in range(0, 40, 3) if n not in (2, 5, 9)]

    def al() -> float:
        return simulated_al(list(evaluator.scores(trainer.candidate(), unseen).values()))

    if values in NEED_A_START:
        start = train()
        for _ in range(40):
            start.step(seen)
        trainer.load(start.tensors())
    before = al()
    for _ in range(120 if values in NEED_A_START else 60):
        trainer.step([verified(request, Draft(trainer.core, trainer.head), target) for request in seen])
    assert al() > before + 0.2


def test_a_knob_of_another_objective_is_refused_and_says_whose_it_is():
    with pytest.raises(ConfigError, match=r'hard_weight = 0.3 belongs to objective = "kl\+ce", and the objective is "kl"'):
        TrainSettings.build({"hard_weight": 0.3}, source="test")
    with pytest.raises(ConfigError, match=r'lk_decay = 1.0 belongs to objective = "lk"'):
        TrainSettings.build({"objective": "aurora", "lk_decay": 1.0}, source="test")
    with pytest.raises(ConfigError, match="objective"):
        TrainSettings.build({"objective": "mse"}, source="test")


@pytest.mark.parametrize("name", OBJECTIVES)
def test_resolved_settings_choose_the_same_objective_again(name):
    settings = TrainSettings.build(json.loads(TrainSettings(objective=name).model_dump_json()), source="test")
    assert settings == TrainSettings(objective=name)
    assert isinstance(make_objective(settings.objective, settings.objective_knobs), Objective)


def test_the_kl_is_told_and_judged_whatever_the_objective(spec, target_dir, target, make_request):
    def first_step(**values):
        settings = TrainSettings(bfloat16=False, **values)
        return Trainer(random_draft(spec, target_dir, target, seed=0), target, settings).step([make_request()])

    kl, tv = first_step(), first_step(objective="tv")
    assert kl.loss == pytest.approx(kl.kl, rel=1e-4)
    assert tv.kl == kl.kl
    assert tv.loss < 1.0 < tv.kl


def test_a_checkpoint_of_another_objective_is_taken_over(spec, target_dir, target, make_request):
    def trainer(**values) -> Trainer:
        return Trainer(random_draft(spec, target_dir, target, seed=0), target, TrainSettings(bfloat16=False, **values))

    reinforced, plain = trainer(objective="reinforce"), trainer()
    request = replace(make_request(), outcomes={5: Outcome((1, 2, 3), 0, 0)})
    reinforced.step([request])
    state = reinforced.tensors()
    expected = reinforced.step([request])
    again = trainer(objective="reinforce")
    again.load(state)
    assert again.step([request]) == expected
    plain.load(state)
    assert torch.equal(plain.core.fc.weight, state["core.fc.weight"])
    reinforced.load(plain.tensors())


def test_noise_is_the_same_for_the_same_seed_and_step(spec, target_dir, target, make_request):
    def losses(noise: float) -> list[float]:
        settings = TrainSettings(bfloat16=False, noise=noise)
        trainer = Trainer(random_draft(spec, target_dir, target, seed=0), target, settings)
        return [trainer.step([make_request()]).loss for _ in range(3)]

    assert losses(0.1) == losses(0.1)
    assert losses(0.1) != losses(0.0)


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
