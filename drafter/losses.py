"""Losses of the draft's logits through a frozen head: logits are made, used and forgotten chunk by chunk.

The head needs no gradient and each loss knows its own, so the forward computes the gradient of the draft's output at once and
neither logits nor probabilities are kept for a backward. `drafter.losses_reference` states the losses plainly.

Shape letters: A anchors, D hidden, U draft vocabulary, C rows of one chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from drafter.teacher import wide

_CHUNK_ROWS = 256


@dataclass(frozen=True)
class DraftChunk:
    """The draft's predictions at some anchors: q = exp_CU / total_C, and log_total_C is the logsumexp of its logits."""

    output_CD: Tensor
    head_UD: Tensor
    exp_CU: Tensor
    total_C: Tensor
    log_total_C: Tensor

    def mean_row(self) -> Tensor:
        """Expected head row [C, D] under the draft, which is the gradient of the logsumexp."""
        return wide(self.exp_CU.to(self.head_UD.dtype) @ self.head_UD) / self.total_C[:, None]

    def probabilities(self) -> Tensor:
        """q [C, U]; the chunk's own memory, so nothing else of it may be read from exp_CU afterwards."""
        return self.exp_CU.div_(self.total_C[:, None])


class LogitLoss(Protocol):
    """A weighted loss of anchors, given a chunk of them at a time."""

    def of(self, rows: slice, draft: DraftChunk) -> tuple[Tensor, Tensor]:
        """(weighted loss [C] of these anchors, its gradient with respect to the draft's output [C, D])."""
        ...


@dataclass(frozen=True)
class Divergence:
    """sum_j c_j KL(t_j || q) for any teachers t_j; that of a one-hot teacher is -log q of its token.

    Teachers enter through weight_A = sum_j c_j, pull_AD = sum_j c_j E_tj[head row] and entropy_A = sum_j c_j H(t_j): the sum is
    `weight * logsumexp(z) - h . pull - entropy`, with z the draft's logits and h its output.
    """

    weight_A: Tensor
    pull_AD: Tensor
    entropy_A: Tensor

    @classmethod
    def from_teacher(cls, weight_A: Tensor, expected_AD: Tensor, entropy_A: Tensor) -> Divergence:
        """One teacher, by its expected head row and its entropy in nats."""
        return cls(weight_A, wide(expected_AD) * weight_A[:, None], entropy_A * weight_A)

    @classmethod
    def from_tokens(cls, weight_A: Tensor, rows_AD: Tensor) -> Divergence:
        """One-hot teachers, by the head rows of their tokens."""
        return cls(weight_A, wide(rows_AD) * weight_A[:, None], torch.zeros_like(weight_A))

    def __add__(self, other: Divergence) -> Divergence:
        return Divergence(self.weight_A + other.weight_A, self.pull_AD + other.pull_AD, self.entropy_A + other.entropy_A)

    def of(self, rows: slice, draft: DraftChunk) -> tuple[Tensor, Tensor]:
        return self.value(rows, draft), (draft.mean_row() * self.weight_A[rows, None]).sub_(self.pull_AD[rows])

    def value(self, rows: slice, draft: DraftChunk) -> Tensor:
        """The weighted loss [C] alone."""
        scores_C = (draft.output_CD * self.pull_AD[rows]).sum(-1)
        return self.weight_A[rows] * draft.log_total_C - scores_C - self.entropy_A[rows]


class _FrozenHeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output_AD: Tensor, head_UD: Tensor, loss: LogitLoss) -> tuple[Tensor, Tensor, Tensor]:
        output_AD = wide(output_AD)
        gradient_AD = torch.empty_like(output_AD)
        total = output_AD.new_zeros(())
        log_total_A = output_AD.new_empty(output_AD.shape[0])
        best_A = torch.empty_like(log_total_A, dtype=torch.int64)
        for start in range(0, output_AD.shape[0], _CHUNK_ROWS):
            rows = slice(start, start + _CHUNK_ROWS)
            logits_CU = wide(output_AD[rows].to(head_UD.dtype) @ head_UD.T)
            top_C, best_A[rows] = logits_CU.max(dim=-1)
            exp_CU = logits_CU.sub_(top_C[:, None]).exp_()
            total_C = exp_CU.sum(-1)
            log_total_A[rows] = top_C + total_C.log()
            draft = DraftChunk(output_AD[rows], head_UD, exp_CU, total_C, log_total_A[rows])
            loss_C, gradient_AD[rows] = loss.of(rows, draft)
            total += loss_C.sum()
        ctx.save_for_backward(gradient_AD)
        ctx.mark_non_differentiable(log_total_A, best_A)
        return total, log_total_A, best_A

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        (gradient_AD,) = ctx.saved_tensors
        return gradient_AD * grads[0], None, None


def frozen_head_loss(output_AD: Tensor, head_UD: Tensor, loss: LogitLoss) -> tuple[Tensor, Tensor, Tensor]:
    """(sum of weighted losses, logsumexp of each anchor's logits [A], draft's most likely draft id [A]).

    Only the sum carries a gradient, and only to output_AD.
    """
    result: tuple[Tensor, Tensor, Tensor] = _FrozenHeadLoss.apply(output_AD, head_UD, loss)
    return result
