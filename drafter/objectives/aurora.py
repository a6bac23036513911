"""Objective `aurora`: rejected proposals are a term of their own (Aurora, arXiv 2602.06932).

Shape letters: A anchors, D hidden, K depths, S sums, M rejected anchors of one depth, B most likely tokens, C rows of one chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from drafter.losses import Divergence
from drafter.objectives.base import SMALLEST_TOTAL, Lesson, Objective
from drafter.teacher import target_logits, wide

_CHUNK_ROWS = 256


@dataclass(frozen=True)
class Aurora(Objective):
    """E_accept[KL(p || q)] + lambda_discard E_discard[KL(p || q)], each a mean of its own.

    Discarded are the depths whose proposal was rejected; a chain's emitted tokens are the accepted ones, so all others count as
    accepted. With discard_top_k, p of the discard term is cut to its most likely tokens and renormalised.
    """

    lambda_discard: float
    discard_top_k: int
    """0: all of the distribution."""

    def totals(self, lesson: Lesson) -> Tensor:
        discard_KA = lesson.credit_KA * lesson.verdicts.rejected_KA
        return torch.stack([lesson.credit_KA.sum(), (lesson.credit_KA - discard_KA).sum(), discard_KA.sum()])

    def term(self, depth: int, lesson: Lesson, totals_S: Tensor) -> Divergence:
        credit_A, rejected_A = lesson.credit_KA[depth], lesson.verdicts.rejected_KA[depth]
        _, accept, discard = totals_S.clamp(min=SMALLEST_TOTAL)
        accept_A = credit_A * ~rejected_A / accept
        discard_A = credit_A * rejected_A * (self.lambda_discard / discard)
        if self.discard_top_k == 0:
            return lesson.divergence(depth, accept_A + discard_A)
        return lesson.divergence(depth, accept_A) + self._cut_divergence(depth, lesson, discard_A)

    def _cut_divergence(self, depth: int, lesson: Lesson, weight_A: Tensor) -> Divergence:
        expected_AD = lesson.teacher.expected_TD.new_zeros(weight_A.numel(), lesson.teacher.expected_TD.shape[1])
        entropy_A = torch.zeros_like(weight_A)
        rows_A = lesson.batch.target_rows(depth)
        for anchors_M in weight_A.nonzero().squeeze(1).split(_CHUNK_ROWS):
            hidden_MD = lesson.batch.hidden_TD[rows_A[anchors_M]]
            logits_MU = target_logits(hidden_MD, lesson.head, lesson.teacher.temperature)
            logits_MB, best_MB = logits_MU.topk(min(self.discard_top_k, logits_MU.shape[1]), dim=-1)
            log_p_MB = logits_MB.log_softmax(-1)
            p_MB = log_p_MB.exp()
            expected_AD[anchors_M] = torch.einsum("mb,mbd->md", p_MB, wide(lesson.head.weight_UD[best_MB]))
            entropy_A[anchors_M] = -(p_MB * log_p_MB).sum(-1)
        return Divergence.from_teacher(weight_A, expected_AD, entropy_A)
