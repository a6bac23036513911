"""Learning to predict what the target predicts: objectives `kl` and `kl+ce`.

Shape letters: A anchors, D hidden, S sums.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from drafter.losses import Divergence
from drafter.objectives.base import SMALLEST_TOTAL, Lesson, Objective


@dataclass(frozen=True)
class Kl(Objective):
    """Mean of KL(p || q), p the target's distribution on the draft vocabulary and q the draft's."""

    def term(self, depth: int, lesson: Lesson, totals_S: Tensor) -> Divergence:
        return lesson.divergence(depth, lesson.credit_KA[depth] / totals_S[0].clamp(min=SMALLEST_TOTAL))


@dataclass(frozen=True)
class KlCe(Objective):
    """(1 - hard_weight) KL(p || q) - hard_weight log q(argmax p): greedy drafting is paid for the target's best token only."""

    hard_weight: float

    def term(self, depth: int, lesson: Lesson, totals_S: Tensor) -> Divergence:
        weight_A = lesson.credit_KA[depth] / totals_S[0].clamp(min=SMALLEST_TOTAL)
        best_A = lesson.teacher.best_T[lesson.batch.target_rows(depth)]
        soft = lesson.divergence(depth, weight_A * (1 - self.hard_weight))
        return soft + Divergence.from_tokens(weight_A * self.hard_weight, lesson.head.weight_UD[best_A])
