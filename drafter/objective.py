"""The loss of one batch: unroll, head, objective. One place joins the parts.

Shape letters: A anchors, T rows, K depths, D hidden, V target vocabulary, S sums of an objective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafter.losses import frozen_head_loss
from drafter.model import DraftCore
from drafter.objectives.base import SMALLEST_TOTAL, Lesson, Objective


@dataclass(frozen=True)
class BatchLoss:
    """loss: the objective's, with a gradient; kl: weighted mean KL to the target, nats, whatever the objective is; agreement_K:
    share of valid anchors whose best token is the target's, each depth on its own; totals_S: what both were divided by."""

    loss: Tensor
    kl: Tensor
    agreement_K: Tensor
    totals_S: Tensor


def batch_loss(
    core: DraftCore,
    lesson: Lesson,
    objective: Objective,
    embedding_VD: Tensor,
    dtype: torch.dtype = torch.float32,
    totals_S: Tensor | None = None,
) -> BatchLoss:
    """Loss of a batch, unrolled as deep as its credit goes. totals_S: `Objective.totals` of the whole, where this is a share."""
    outputs = core.unroll(lesson.batch, embedding_VD, lesson.credit_KA.shape[0], dtype)
    return loss_of_outputs(outputs, lesson, objective, objective.totals(lesson) if totals_S is None else totals_S)


def loss_of_outputs(outputs: Sequence[Tensor], lesson: Lesson, objective: Objective, totals_S: Tensor) -> BatchLoss:
    """Loss of the unroll's outputs [A, D], one for each depth."""
    batch, teacher = lesson.batch, lesson.teacher
    parts, divergences, agreement = [], [], []
    for depth, output_AD in enumerate(outputs):
        part, log_total_A, best_A = frozen_head_loss(output_AD, lesson.head.weight_UD, objective.term(depth, lesson, totals_S))
        parts.append(part)
        rows_A, valid_A = batch.target_rows(depth), batch.valid_KA[depth]
        kl_A = log_total_A - (output_AD.detach() * teacher.expected_TD[rows_A]).sum(-1) - teacher.entropy_T[rows_A]
        divergences.append((kl_A * lesson.credit_KA[depth]).sum())
        agreement.append(((best_A == teacher.best_T[rows_A]) & valid_A).sum() / valid_A.sum().clamp(min=1))
    kl = torch.stack(divergences).sum() / totals_S[0].clamp(min=SMALLEST_TOTAL)
    return BatchLoss(torch.stack(parts).sum(), kl, torch.stack(agreement), totals_S)
