"""Objective `reinforce`: a policy gradient on what verification accepted and rejected.

The draft is the policy, a proposal its action. Each accepted proposal is worth 1, so that the reward of a verify step is the
accepted length, and the rejected one -1; what lies beyond a rejection was not judged and gets nothing. Credit is given by
position: `A_s = r_s + V_{s+1} - V_s` with V the mean return by depth, the running baseline (REINFORCE with baseline, Williams
1992; one-step actor-critic, Sutton and Barto 2018, section 13.5). The mean return of the depths that an acceptance opens stands in
for the realised one, which says more about the text than about the proposal: an accepted proposal never counts against itself.

Proposals are greedy, so the policy that made them gave them probability 1, and the importance weight of one is q(proposal). The
gradient is then that of -A_s q(proposal): bounded, where -A_s log q(proposal) pushes a rejected token down without end.

Shape letters: A anchors, K depths, D hidden, S sums, V target vocabulary, C rows of one chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from drafter.losses import Divergence, DraftChunk
from drafter.objectives.base import SMALLEST_TOTAL, Lesson, Objective
from drafter.teacher import wide

_BASELINE = "returns_2K"


@dataclass(frozen=True)
class PolicyLoss:
    """-gain q(proposal) + a KL, by the head rows of the proposals."""

    gain_A: Tensor
    rows_AD: Tensor
    kl: Divergence

    def of(self, rows: slice, draft: DraftChunk) -> tuple[Tensor, Tensor]:
        row_CD = wide(self.rows_AD[rows])
        # Products in bfloat16 may round a probability to above 1.
        log_q_C = ((draft.output_CD * row_CD).sum(-1) - draft.log_total_C).clamp(max=0.0)
        won_C = self.gain_A[rows] * log_q_C.exp()
        # d won / d h = won (w_proposal - E_q[w]), and the KL pulls by the same expected head row.
        weight_C = self.kl.weight_A[rows] + won_C
        pull_CD = self.kl.pull_AD[rows] + row_CD * won_C[:, None]
        return self.kl.value(rows, draft) - won_C, draft.mean_row() * weight_C[:, None] - pull_CD


class Reinforce(Objective):
    """-E[A_s q(proposal)] over judged proposals + kl_weight E[KL(p || q)] over all positions.

    A policy gradient alone finds no token that was never proposed; the KL does.
    """

    def __init__(self, baseline_momentum: float, kl_weight: float) -> None:
        self.baseline_momentum, self.kl_weight = baseline_momentum, kl_weight
        self._past_2K: Tensor | None = None
        """Decayed sums of returns and of their number, by depth."""

    def totals(self, lesson: Lesson) -> Tensor:
        judged_KA = _judged(lesson)
        returns_KA = _rewards(lesson).flip(0).cumsum(0).flip(0) * judged_KA
        sums = (lesson.credit_KA.sum().view(1), (lesson.credit_KA * judged_KA).sum().view(1))
        return torch.cat([*sums, returns_KA.sum(1), judged_KA.sum(1)])

    def term(self, depth: int, lesson: Lesson, totals_S: Tensor) -> PolicyLoss:
        every, judged = totals_S[:2].clamp(min=SMALLEST_TOTAL)
        credit_A = lesson.credit_KA[depth]
        return PolicyLoss(
            gain_A=credit_A / judged * self._advantage(lesson, totals_S)[depth],
            rows_AD=lesson.head.weight_UD[_draft_ids(lesson)[depth].clamp(min=0)],
            kl=lesson.divergence(depth, credit_A * (self.kl_weight / every)),
        )

    def follow(self, totals_S: Tensor) -> None:
        self._past_2K = self._returns(totals_S)

    def tensors(self) -> dict[str, Tensor]:
        return {} if self._past_2K is None else {_BASELINE: self._past_2K}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self._past_2K = tensors.get(_BASELINE)

    def _advantage(self, lesson: Lesson, totals_S: Tensor) -> Tensor:
        """A [K, A], 0 where nothing was judged."""
        judged_KA = _judged(lesson)
        sums_K, counts_K = self._returns(totals_S)
        value_K = sums_K / counts_K.clamp(min=SMALLEST_TOTAL)
        opened_KA = torch.zeros_like(lesson.credit_KA)
        opened_KA[:-1] = value_K[1:, None] * judged_KA[1:]
        return (_rewards(lesson) + opened_KA - value_K[:, None]) * judged_KA

    def _returns(self, totals_S: Tensor) -> Tensor:
        """Sums of returns and their number by depth [2, K]: this batch's, and what is left of those before."""
        present_2K = totals_S[2:].view(2, -1)
        past_2K = self._past_2K
        if past_2K is None or past_2K.shape != present_2K.shape:  # another depth of unroll than before
            return present_2K
        return present_2K + self.baseline_momentum * past_2K.to(present_2K)


def _draft_ids(lesson: Lesson) -> Tensor:
    """Draft ids of the proposals [K, A], -1 where there is none or the present vocabulary cannot propose it."""
    vocabulary, proposed_KA = lesson.head.vocabulary, lesson.verdicts.proposed_KA
    is_token_KA = (proposed_KA >= 0) & (proposed_KA < vocabulary.vocab_size)
    draft_ids_V = vocabulary.draft_ids_V.to(proposed_KA.device)
    return torch.where(is_token_KA, draft_ids_V[proposed_KA.clamp(0, vocabulary.vocab_size - 1)], -1)


def _judged(lesson: Lesson) -> Tensor:
    """Which proposals can be learned from [K, A], as 0 and 1."""
    verdicts, valid_KA = lesson.verdicts, lesson.batch.valid_KA[: lesson.credit_KA.shape[0]]
    is_judged_KA = (verdicts.accepted_KA | verdicts.rejected_KA) & valid_KA & (_draft_ids(lesson) >= 0)
    return is_judged_KA.to(lesson.credit_KA.dtype)


def _rewards(lesson: Lesson) -> Tensor:
    return _judged(lesson) * torch.where(lesson.verdicts.rejected_KA, -1.0, 1.0).to(lesson.credit_KA.dtype)
