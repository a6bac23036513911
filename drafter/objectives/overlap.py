"""Objectives for a draft whose proposals are sampled: `tv` and `lk`.

Such a proposal is accepted with probability alpha = sum_u min(p_u, q_u), so 1 - alpha, the total variation distance of p and q, is
what acceptance loses (Leviathan et al. 2023, corollary 3.6). Greedy proposals, vLLM's default, are not accepted with it.

Shape letters: A anchors, U draft vocabulary, D hidden, S sums, C rows of one chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from drafter.head import Head
from drafter.losses import DraftChunk
from drafter.objectives.base import SMALLEST_TOTAL, Lesson, Objective
from drafter.teacher import target_logits, wide


@dataclass(frozen=True)
class OverlapLoss:
    """weight (blend KL(p || q) + (1 - blend) TV(p, q)) with blend = exp(-decay alpha), a constant to the gradient."""

    weight_A: Tensor
    hidden_AD: Tensor
    """The target's final hidden rows, from which p is recomputed."""
    expected_AD: Tensor
    entropy_A: Tensor
    head: Head
    temperature: float
    decay: float | None
    """None: TV alone."""

    def of(self, rows: slice, draft: DraftChunk) -> tuple[Tensor, Tensor]:
        p_CU = target_logits(self.hidden_AD[rows], self.head, self.temperature).softmax(-1)
        q_CU = draft.probabilities()
        alpha_C = torch.minimum(p_CU, q_CU).sum(-1)
        blend_C = torch.zeros_like(alpha_C) if self.decay is None else (-self.decay * alpha_C).exp()
        kl_C = draft.log_total_C - (draft.output_CD * self.expected_AD[rows]).sum(-1) - self.entropy_A[rows]
        loss_C = blend_C * kl_C + (1 - blend_C) * (1 - alpha_C)
        # d alpha / d z_u = q_u ([q_u < p_u] - sum_v q_v [q_v < p_v]); d KL / d z = q - p, and p enters as its expected head row.
        short_CU = (q_CU < p_CU).to(q_CU.dtype)
        mean_short_C = (q_CU * short_CU).sum(-1)
        lost_CU = short_CU.sub_(mean_short_C[:, None]).mul_(blend_C[:, None] - 1)
        pull_CU = lost_CU.add_(blend_C[:, None]).mul_(q_CU)
        gradient_CD = wide(pull_CU.to(self.head.weight_UD.dtype) @ self.head.weight_UD)
        gradient_CD -= blend_C[:, None] * self.expected_AD[rows]
        weight_C = self.weight_A[rows]
        return loss_C * weight_C, gradient_CD * weight_C[:, None]


def _overlap_loss(depth: int, lesson: Lesson, totals_S: Tensor, decay: float | None) -> OverlapLoss:
    rows_A, teacher = lesson.batch.target_rows(depth), lesson.teacher
    return OverlapLoss(
        weight_A=lesson.credit_KA[depth] / totals_S[0].clamp(min=SMALLEST_TOTAL),
        hidden_AD=lesson.batch.hidden_TD[rows_A],
        expected_AD=teacher.expected_TD[rows_A],
        entropy_A=teacher.entropy_T[rows_A],
        head=lesson.head,
        temperature=teacher.temperature,
        decay=decay,
    )


@dataclass(frozen=True)
class TotalVariation(Objective):
    """Mean of TV(p, q). Its gradient vanishes where p and q do not overlap: it does not lead away from a random draft."""

    def term(self, depth: int, lesson: Lesson, totals_S: Tensor) -> OverlapLoss:
        return _overlap_loss(depth, lesson, totals_S, decay=None)


@dataclass(frozen=True)
class Lk(Objective):
    """Mean of the LK loss (arXiv 2602.23881): KL where p and q hardly overlap, turning into TV as they do.

    The paper blends by the mean alpha of a depth; here each position has its own.
    """

    lk_decay: float

    def term(self, depth: int, lesson: Lesson, totals_S: Tensor) -> OverlapLoss:
        return _overlap_loss(depth, lesson, totals_S, self.lk_decay)
