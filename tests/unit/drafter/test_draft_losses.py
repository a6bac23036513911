from __future__ import annotations

import pytest
import torch

from drafter.batch import pack
from drafter.create import random_draft
from drafter.credit import CreditWeights, Outcome, batch_verdicts, credit, verdicts
from drafter.head import Head
from drafter.losses import Divergence, frozen_head_loss
from drafter.losses_reference import distribution, kl
from drafter.objective import batch_loss
from drafter.objectives import make_objective
from drafter.objectives.base import Lesson
from drafter.teacher import TeacherRows, teach
from drafter.vocabulary import choose_vocabulary


def own_head(target) -> Head:
    """A head whose rows are not the target's, so that the two cannot be confused."""
    vocabulary = choose_vocabulary(torch.arange(64.0), [60], 32)
    torch.manual_seed(5)
    return Head.imported(vocabulary, torch.randn(32, 16), target.head_VD)


def test_a_perfect_draft_has_no_divergence(target):
    head = Head.of_target(choose_vocabulary(torch.zeros(64), [], 32), target.head_VD)
    hidden = torch.randn(5, 16, generator=torch.Generator().manual_seed(2))
    rows = teach(hidden, head)
    divergence = Divergence.from_teacher(torch.ones(5), rows.expected_TD, rows.entropy_T)
    total, _, best = frozen_head_loss(hidden, head.weight_UD, divergence)
    assert float(total) == pytest.approx(0.0, abs=1e-4)
    assert torch.equal(best, rows.best_T)


def test_an_imported_head_is_taught_in_its_own_rows(target):
    head = own_head(target)
    hidden = torch.randn(4, 16, generator=torch.Generator().manual_seed(2))
    p = torch.softmax(hidden @ head.target_UD.T, -1)
    torch.testing.assert_close(teach(hidden, head).expected_TD, p @ head.weight_UD, atol=1e-5, rtol=1e-5)


def test_loss_of_a_batch_is_the_plain_weighted_mean_and_trains_only_the_core(target_dir, spec, target, make_request):
    draft = random_draft(spec, target_dir, target, seed=0)
    request = make_request(4, 10)
    batch = pack([request], 3)
    found = batch_verdicts(batch, [{}], 3)
    credit_KA = credit(found, CreditWeights()) * batch.valid_KA
    lesson = Lesson(batch, teach(request.hidden_TD, draft.head), draft.head, found, credit_KA)
    result = batch_loss(draft.core, lesson, make_objective("kl", {}), target.embedding_VD)
    outputs = draft.core.unroll(batch, target.embedding_VD, 3)
    total = torch.zeros(())
    for depth, anchor in batch.valid_KA.nonzero().tolist():
        p = distribution(request.hidden_TD[int(batch.target_rows(depth)[anchor])], draft.head.target_UD)
        q = distribution(outputs[depth][anchor], draft.head.weight_UD)
        total = total + credit_KA[depth, anchor] * kl(p, q)
    torch.testing.assert_close(result.loss, total / credit_KA.sum(), atol=1e-5, rtol=1e-4)
    result.loss.backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in draft.core.parameters())


def test_anchors_without_target_rows_do_not_count(make_request):
    batch = pack([make_request(4, 10)], 3)
    weights = credit(batch_verdicts(batch, [{}], 3), CreditWeights(depth_decay=1.0)) * batch.valid_KA
    assert weights.sum(1).tolist() == [6.0, 5.0, 4.0]


def test_credit_names_accepted_rejected_and_beyond():
    weights = CreditWeights(accepted=1.0, rejected=2.0, beyond=0.5, unverified=0.1, depth_decay=1.0)
    outcomes = {
        7: Outcome((1, 2, 3), 1, 0),
        9: Outcome((1, 2, 3), 3, 0),
        10: Outcome((), 0, 0),
        11: Outcome((1, 2), 2, 0),
        12: Outcome((1, 2, 3, 4, 5), 4, 0),
    }
    result = credit(verdicts(outcomes, torch.tensor([7, 8, 9, 10, 11, 12]), 3), weights)
    assert result[:, 0].tolist() == [1.0, 2.0, 0.5]
    assert result[:, 1].tolist() == pytest.approx([0.1, 0.1, 0.1])
    assert result[:, 2].tolist() == [1.0, 1.0, 1.0]
    assert result[:, 3].tolist() == pytest.approx([0.1, 0.1, 0.1])
    assert result[:, 4].tolist() == [1.0, 1.0, 0.5]
    assert result[:, 5].tolist() == [1.0, 1.0, 1.0]


def test_credit_decays_with_depth():
    assert credit(verdicts({}, torch.tensor([3]), 3), CreditWeights(depth_decay=0.5))[:, 0].tolist() == [1.0, 0.5, 0.25]


def test_teacher_rows_name_the_vocabulary_they_belong_to(target):
    head = own_head(target)
    rows = teach(torch.randn(2, 16), head)
    assert isinstance(rows, TeacherRows)
    assert rows.vocabulary_sha256 == head.vocabulary.sha256
