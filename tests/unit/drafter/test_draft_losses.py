from __future__ import annotations

import pytest
import torch

from drafter.batch import pack
from drafter.create import random_draft
from drafter.credit import CreditWeights, Outcome, batch_credit, credit
from drafter.head import Head
from drafter.losses import soft_cross_entropy
from drafter.losses_reference import soft_cross_entropy_of, unrolled_loss
from drafter.objective import objective
from drafter.teacher import TeacherRows, teach
from drafter.vocabulary import choose_vocabulary


def own_head(target) -> Head:
    """A head whose rows are not the target's, so that the two cannot be confused."""
    vocabulary = choose_vocabulary(torch.arange(64.0), [60], 32)
    torch.manual_seed(5)
    return Head.imported(vocabulary, torch.randn(32, 16), target.head_VD)


@pytest.mark.parametrize("hard_weight", [0.0, 0.3])
def test_fast_loss_and_gradient_equal_reference(target, hard_weight):
    head = Head.of_target(choose_vocabulary(torch.zeros(64), [60], 32), target.head_VD)
    torch.manual_seed(7)
    output, hidden, weight = torch.randn(9, 16), torch.randn(9, 16), torch.rand(9)
    fast_in, slow_in = output.clone().requires_grad_(), output.clone().requires_grad_()
    rows = teach(hidden, head, hard_weight=hard_weight)
    total, each, _ = soft_cross_entropy(fast_in, head.weight_UD, rows.expected_TD, weight)
    slow = torch.stack([soft_cross_entropy_of(slow_in[i], hidden[i], head.weight_UD, hard_weight) for i in range(9)])
    total.backward()
    (slow * weight).sum().backward()
    torch.testing.assert_close(each, slow.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(fast_in.grad, slow_in.grad, atol=1e-6, rtol=1e-5)


def test_loss_of_a_perfect_draft_is_the_target_entropy(target):
    head = Head.of_target(choose_vocabulary(torch.zeros(64), [], 32), target.head_VD)
    hidden = torch.randn(5, 16, generator=torch.Generator().manual_seed(2))
    rows = teach(hidden, head)
    _, each, best = soft_cross_entropy(hidden, head.weight_UD, rows.expected_TD, torch.ones(5))
    torch.testing.assert_close(each, rows.entropy_T, atol=1e-4, rtol=1e-4)
    assert torch.equal(best, rows.best_T)


def test_an_imported_head_is_taught_in_its_own_rows(target):
    head = own_head(target)
    hidden = torch.randn(4, 16, generator=torch.Generator().manual_seed(2))
    p = torch.softmax(hidden @ head.target_UD.T, -1)
    torch.testing.assert_close(teach(hidden, head).expected_TD, p @ head.weight_UD, atol=1e-5, rtol=1e-5)


def test_objective_equals_plain_weighted_mean_and_trains_only_the_core(target_dir, spec, target, make_request):
    draft = random_draft(spec, target_dir, target, seed=0)
    request = make_request(4, 10)
    batch = pack([request], 3)
    weights = batch_credit(batch, [{}], 3, CreditWeights())
    teacher = teach(request.hidden_TD, draft.head)
    result = objective(draft.core, batch, teacher, draft.head, target.embedding_VD, weights)
    outputs = draft.core.unroll(batch, target.embedding_VD, 3)
    losses = [
        [
            soft_cross_entropy_of(outputs[k][a], request.hidden_TD[int(batch.target_rows(k)[a])], draft.head.weight_UD)
            - teacher.entropy_T[int(batch.target_rows(k)[a])]
            for a in range(batch.anchors_A.numel())
        ]
        for k in range(3)
    ]
    torch.testing.assert_close(result.loss, unrolled_loss(losses, weights.tolist()), atol=1e-5, rtol=1e-4)
    result.loss.backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in draft.core.parameters())


def test_anchors_without_target_rows_do_not_count(make_request):
    batch = pack([make_request(4, 10)], 3)
    weights = batch_credit(batch, [{}], 3, CreditWeights(depth_decay=1.0))
    assert weights.sum(1).tolist() == [6.0, 5.0, 4.0]


def test_credit_names_accepted_rejected_and_beyond():
    weights = CreditWeights(accepted=1.0, rejected=2.0, beyond=0.5, unverified=0.1, depth_decay=1.0)
    outcomes = {7: Outcome((1, 2, 3), 1, 0), 9: Outcome((1, 2, 3), 3, 0), 10: Outcome((), 0, 0)}
    result = credit(outcomes, torch.tensor([7, 8, 9, 10]), 3, weights)
    assert result[:, 0].tolist() == [1.0, 2.0, 0.5]
    assert result[:, 1].tolist() == pytest.approx([0.1, 0.1, 0.1])
    assert result[:, 2].tolist() == [1.0, 1.0, 1.0]
    assert result[:, 3].tolist() == pytest.approx([0.1, 0.1, 0.1])


def test_credit_decays_with_depth():
    assert credit({}, torch.tensor([3]), 3, CreditWeights(depth_decay=0.5))[:, 0].tolist() == [1.0, 0.5, 0.25]


def test_teacher_rows_name_the_vocabulary_they_belong_to(target):
    head = own_head(target)
    rows = teach(torch.randn(2, 16), head)
    assert isinstance(rows, TeacherRows)
    assert rows.vocabulary_sha256 == head.vocabulary.sha256
