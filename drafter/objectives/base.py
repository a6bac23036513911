"""Objective: what a training step makes smaller, stated for one depth of the unroll at a time.

Shape letters: A anchors, T rows, K depths, D hidden, S sums of an objective.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from drafter.batch import Batch
from drafter.credit import Verdicts
from drafter.head import Head
from drafter.losses import Divergence, LogitLoss
from drafter.teacher import TeacherRows

SMALLEST_TOTAL = 1e-6
"""Of weights that a loss is divided by: where none is left the loss is 0."""


@dataclass(frozen=True)
class Lesson:
    """What a batch teaches. Teacher rows are in the batch's row order; credit_KA [K, A] is how much each anchor and depth counts,
    0 where it is not valid."""

    batch: Batch
    teacher: TeacherRows
    head: Head
    verdicts: Verdicts
    credit_KA: Tensor

    def divergence(self, depth: int, weight_A: Tensor) -> Divergence:
        """KL to the target at a depth."""
        rows_A = self.batch.target_rows(depth)
        return Divergence.from_teacher(weight_A, self.teacher.expected_TD[rows_A], self.teacher.entropy_T[rows_A])


class Objective:
    """The base of all; what it defines suits one that remembers nothing and divides by the credit alone."""

    def totals(self, lesson: Lesson) -> Tensor:
        """Sums [S] over a batch that its loss is divided by; the first is that of the credit.

        Where a batch is computed in shares, the sums of the shares are added before any share's loss is computed. The losses
        of the shares then add up to that of the batch.
        """
        return lesson.credit_KA.sum().view(1)

    def term(self, depth: int, lesson: Lesson, totals_S: Tensor) -> LogitLoss:
        """The share of one depth in the loss."""
        raise NotImplementedError

    def follow(self, totals_S: Tensor) -> None:
        """Remember what a finished step saw."""

    def tensors(self) -> dict[str, Tensor]:
        """What it remembers, for a checkpoint."""
        return {}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from what `tensors` returned; anything missing starts anew."""
