"""Every objective against its plain statement, in float64, on a packed batch with gaps, rejections and unknown proposals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from drafter import losses_reference as slow
from drafter.batch import RequestRows, pack
from drafter.credit import CreditWeights, Outcome, batch_verdicts, credit
from drafter.head import Head
from drafter.objective import BatchLoss, loss_of_outputs
from drafter.objectives import OBJECTIVES, aurora, make_objective
from drafter.objectives.base import Lesson
from drafter.teacher import teach
from drafter.vocabulary import choose_vocabulary

DEPTH, TEMPERATURE = 3, 0.8
WEIGHTS = CreditWeights(accepted=1.0, rejected=1.5, beyond=0.5, unverified=0.7, depth_decay=0.8)
UNKNOWN = 5
"""A token the draft vocabulary (32..63) lacks."""
OUTCOMES = (
    {3: Outcome((40, 41, 42), 1, 0), 4: Outcome((33, 34, 35), 0, 0), 8: Outcome((50, UNKNOWN, 52), 2, 0), 9: Outcome((), 0, 0)},
    {2: Outcome((60, 61, 62), 3, 0), 4: Outcome((UNKNOWN, 44, 45), 0, 0), 5: Outcome((36, 37), 2, 0), 6: Outcome((38,), 0, 0)},
)
CASES: list[tuple[str, dict[str, Any], Callable[[list[slow.Position]], Tensor]]] = [
    ("kl", {}, slow.kl_loss),
    ("kl+ce", {"hard_weight": 0.3}, lambda at: slow.kl_ce_loss(at, 0.3)),
    ("aurora", {"lambda_discard": 0.4, "discard_top_k": 0}, lambda at: slow.aurora_loss(at, 0.4, 0)),
    ("aurora", {"lambda_discard": 0.4, "discard_top_k": 3}, lambda at: slow.aurora_loss(at, 0.4, 3)),
    ("aurora", {"lambda_discard": 0.4, "discard_top_k": 99}, lambda at: slow.aurora_loss(at, 0.4, 0)),
    ("aurora", {"lambda_discard": 0.0, "discard_top_k": 3}, lambda at: slow.aurora_loss(at, 0.0, 0)),
    ("reinforce", {"baseline_momentum": 0.9, "kl_weight": 0.0}, lambda at: slow.reinforce_loss(at, 0.0)),
    ("reinforce", {"baseline_momentum": 0.9, "kl_weight": 0.2}, lambda at: slow.reinforce_loss(at, 0.2)),
    ("tv", {}, slow.tv_loss),
    ("lk", {"lk_decay": 3.0}, lambda at: slow.lk_loss(at, 3.0)),
    ("lk", {"lk_decay": 0.0}, slow.kl_loss),
]
EVERY = [(name, knobs) for name, knobs, _ in CASES]
IDS = [name + "".join(f",{knob}={value}" for knob, value in knobs.items()) for name, knobs in EVERY]


@pytest.fixture
def head(target) -> Head:
    """Rows that are not the target's, so that the two cannot be confused."""
    rows_UD = torch.randn(32, 16, generator=torch.Generator().manual_seed(5)).double()
    return Head.imported(choose_vocabulary(torch.arange(64.0), [60], 32), rows_UD, target.head_VD.double())


@pytest.fixture
def requests(make_request) -> list[RequestRows]:
    made = [make_request(4, 14, seed=1, missing=(7,)), make_request(3, 10, seed=2)]
    return [replace(each, aux_TX=each.aux_TX.double(), hidden_TD=each.hidden_TD.double()) for each in made]


def lesson_of(requests: Sequence[RequestRows], head: Head, outcomes=OUTCOMES, weights: CreditWeights = WEIGHTS) -> Lesson:
    batch = pack(requests, DEPTH)
    found = batch_verdicts(batch, outcomes, DEPTH)
    teacher = teach(batch.hidden_TD, head, temperature=TEMPERATURE)
    return Lesson(batch, teacher, head, found, credit(found, weights).double() * batch.valid_KA)


def outputs_of(lesson: Lesson) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    count = lesson.batch.anchors_A.numel()
    return [torch.randn(count, 16, generator=generator).double().requires_grad_() for _ in range(DEPTH)]


def judge(name: str, knobs: dict[str, Any], outputs: list[Tensor], lesson: Lesson) -> BatchLoss:
    objective = make_objective(name, knobs)
    return loss_of_outputs(outputs, lesson, objective, objective.totals(lesson))


def gradients(loss: Tensor, outputs: list[Tensor]) -> Tensor:
    return torch.stack(torch.autograd.grad(loss, outputs, allow_unused=True, materialize_grads=True))


def positions(outputs: list[Tensor], lesson: Lesson, requests: Sequence[RequestRows]) -> list[slow.Position]:
    """All that count, each read off the requests and outcomes on its own."""
    found = []
    known = {int(token): number for number, token in enumerate(lesson.head.vocabulary.ids_U)}
    for bounds, outcomes, request in zip(lesson.batch.bounds, OUTCOMES, requests, strict=True):
        hidden = dict(zip(request.positions_T.tolist(), request.hidden_TD, strict=True))
        for anchor in range(bounds.anchor_start, bounds.anchor_end):
            position = int(lesson.batch.positions_T[lesson.batch.anchors_A[anchor]])
            outcome = outcomes.get(position, Outcome((), 0, 0))
            for depth in range(DEPTH):
                if any(position + 1 + step not in hidden for step in range(depth + 1)):
                    break
                proposed = outcome.proposed_ids[depth] if depth < len(outcome.proposed_ids) else None
                verdict, weight = "none", WEIGHTS.beyond if outcome.proposed_ids else WEIGHTS.unverified
                if depth < outcome.num_accepted:
                    verdict, weight = "accepted", WEIGHTS.accepted
                elif depth == outcome.num_accepted and proposed is not None:
                    verdict, weight = "rejected", WEIGHTS.rejected
                found.append(
                    slow.Position(
                        p_U=slow.distribution(hidden[position + 1 + depth], lesson.head.target_UD, TEMPERATURE),
                        q_U=slow.distribution(outputs[depth][anchor], lesson.head.weight_UD),
                        weight=weight * WEIGHTS.depth_decay**depth,
                        verdict=verdict,
                        proposed=known.get(proposed),
                        depth=depth,
                        step=anchor,
                    )
                )
    return found


@pytest.mark.parametrize(("name", "knobs", "reference"), CASES, ids=IDS)
def test_value_and_gradient_equal_the_plain_statement(head, requests, name, knobs, reference):
    lesson = lesson_of(requests, head)
    outputs = outputs_of(lesson)
    fast, plain = judge(name, knobs, outputs, lesson), positions(outputs, lesson, requests)
    assert {at.verdict for at in plain} == {"accepted", "rejected", "none"}
    expected = reference(plain)
    torch.testing.assert_close(fast.loss, expected, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(gradients(fast.loss, outputs), gradients(expected, outputs), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(fast.kl, slow.kl_loss(plain).detach(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(("name", "knobs"), EVERY, ids=IDS)
def test_what_is_not_valid_contributes_nothing(head, requests, name, knobs):
    lesson = lesson_of(requests, head)
    outputs = outputs_of(lesson)
    invalid_KA = ~lesson.batch.valid_KA
    assert bool(invalid_KA.any())
    wild = [
        torch.where(invalid_A[:, None], 1e3, output.detach()) for invalid_A, output in zip(invalid_KA, outputs, strict=True)
    ]
    wild = [output.requires_grad_() for output in wild]
    usual, changed = judge(name, knobs, outputs, lesson), judge(name, knobs, wild, lesson)
    torch.testing.assert_close(changed.loss, usual.loss)
    gradient = gradients(changed.loss, wild)
    torch.testing.assert_close(gradient, gradients(usual.loss, outputs))
    assert bool((gradient[invalid_KA] == 0).all())


@pytest.mark.parametrize(("name", "knobs"), EVERY, ids=IDS)
def test_credit_of_zero_contributes_nothing(head, requests, name, knobs):
    none = CreditWeights(accepted=0.0, rejected=0.0, beyond=0.0, unverified=0.0)
    lesson = lesson_of(requests, head, weights=none)
    outputs = outputs_of(lesson)
    result = judge(name, knobs, outputs, lesson)
    assert float(result.loss.detach()) == float(result.kl) == 0.0
    assert bool((gradients(result.loss, outputs) == 0).all())
    some = lesson_of(requests, head, weights=replace(none, rejected=1.0))
    gradient = gradients(judge(name, knobs, outputs, some).loss, outputs)
    assert bool((gradient[some.credit_KA == 0] == 0).all())


@pytest.mark.parametrize(("name", "knobs"), EVERY, ids=IDS)
def test_chunk_boundaries_do_not_matter(head, requests, name, knobs, monkeypatch):
    lesson = lesson_of(requests, head)
    outputs = outputs_of(lesson)
    whole = judge(name, knobs, outputs, lesson)
    monkeypatch.setattr("drafter.losses._CHUNK_ROWS", 4)
    monkeypatch.setattr(aurora, "_CHUNK_ROWS", 1)
    pieces = judge(name, knobs, outputs, lesson)
    torch.testing.assert_close(pieces.loss, whole.loss)
    torch.testing.assert_close(gradients(pieces.loss, outputs), gradients(whole.loss, outputs))


@pytest.mark.parametrize(("name", "knobs"), EVERY, ids=IDS)
def test_shares_of_a_batch_add_up_to_it(head, requests, name, knobs):
    whole = lesson_of(requests, head)
    outputs = outputs_of(whole)
    objective = make_objective(name, knobs)
    shares = [lesson_of([request], head, [found]) for request, found in zip(requests, OUTCOMES, strict=True)]
    totals_S = sum(objective.totals(share) for share in shares)
    results = []
    for share, bounds in zip(shares, whole.batch.bounds, strict=True):
        part = [output[bounds.anchor_start : bounds.anchor_end] for output in outputs]
        results.append(loss_of_outputs(part, share, objective, totals_S))
    expected = loss_of_outputs(outputs, whole, objective, objective.totals(whole))
    torch.testing.assert_close(sum(result.loss for result in results), expected.loss)
    torch.testing.assert_close(sum(result.kl for result in results), expected.kl)


@pytest.mark.parametrize(("name", "knobs"), EVERY, ids=IDS)
def test_products_in_bfloat16_come_close(head, requests, name, knobs):
    lesson = lesson_of(requests, head)
    outputs = outputs_of(lesson)
    exact = judge(name, knobs, outputs, lesson)
    rough_head = head.to(torch.bfloat16)
    rows = replace(lesson.teacher, expected_TD=lesson.teacher.expected_TD.float(), entropy_T=lesson.teacher.entropy_T.float())
    rough = replace(lesson, head=rough_head, teacher=rows, credit_KA=lesson.credit_KA.float())
    rough_outputs = [output.detach().float().requires_grad_() for output in outputs]
    result = judge(name, knobs, rough_outputs, rough)
    torch.testing.assert_close(result.loss.double(), exact.loss, rtol=0.05, atol=0.02)
    expected, found = gradients(exact.loss, outputs), gradients(result.loss, rough_outputs).double()
    assert float(torch.cosine_similarity(expected.flatten(), found.flatten(), dim=0)) > 0.99


def test_every_objective_is_tested():
    assert {name for name, _ in EVERY} == OBJECTIVES.keys()


def test_proposals_the_draft_cannot_make_teach_nothing(head, requests):
    strange = ({3: Outcome((UNKNOWN, -1, 10_000), 0, 0), 4: Outcome((10_000,), 0, 0)}, {2: Outcome((-1, -1, -1), 0, 0)})
    lesson = lesson_of(requests, head, strange)
    outputs = outputs_of(lesson)
    result = judge("reinforce", {"baseline_momentum": 0.9, "kl_weight": 0.0}, outputs, lesson)
    assert float(result.loss.detach()) == 0.0
    assert bool((gradients(result.loss, outputs) == 0).all())
    discarded = judge("aurora", {"lambda_discard": 0.4, "discard_top_k": 3}, outputs, lesson)
    assert bool(discarded.loss.isfinite())


def test_reinforced_are_accepted_proposals_and_discouraged_rejected_ones(head, requests):
    lesson = lesson_of(requests, head)
    outputs = outputs_of(lesson)
    result = judge("reinforce", {"baseline_momentum": 0.9, "kl_weight": 0.0}, outputs, lesson)
    moved = [output - 0.1 * step for output, step in zip(outputs, gradients(result.loss, outputs), strict=True)]
    draft_ids_V = lesson.head.vocabulary.draft_ids_V
    for chosen_KA, sign in ((lesson.verdicts.accepted_KA, 1.0), (lesson.verdicts.rejected_KA, -1.0)):
        judged_KA = chosen_KA & lesson.batch.valid_KA & (draft_ids_V[lesson.verdicts.proposed_KA.clamp(min=0)] >= 0)
        assert judged_KA.sum() >= 3
        for depth, anchor in judged_KA.nonzero().tolist():
            token = int(draft_ids_V[lesson.verdicts.proposed_KA[depth, anchor]])
            before, after = (
                slow.distribution(each[depth][anchor], lesson.head.weight_UD)[token].detach() for each in (outputs, moved)
            )
            assert sign * float(after - before) > 0


def test_the_baseline_remembers_past_returns_and_survives_a_checkpoint(head, requests):
    knobs = {"baseline_momentum": 0.5, "kl_weight": 0.0}
    lesson = lesson_of(requests, head)
    rejections = lesson_of(requests, head, ({3: Outcome((40,), 0, 0)}, {2: Outcome((60,), 0, 0)}))
    outputs = outputs_of(lesson)
    fresh, experienced, restored = (make_objective("reinforce", knobs) for _ in range(3))

    def loss(objective) -> float:
        return float(loss_of_outputs(outputs, rejections, objective, objective.totals(rejections)).loss.detach())

    assert loss(fresh) == 0.0  # as bad as ever: nothing to learn from
    experienced.follow(experienced.totals(lesson))
    restored.load(experienced.tensors())
    assert loss(restored) == loss(experienced) != 0.0
    restored.load({})
    assert loss(restored) == 0.0
