"""Fast soft cross-entropy through a frozen head: logits are made, used and forgotten chunk by chunk.

The gradient with respect to the draft's output is (softmax(z) W - expected) * weight, so the forward can compute it at once
and neither logits nor probabilities are kept for a backward. `drafter.losses_reference` states the loss plainly.

Shape letters: A anchors, D hidden, U draft vocabulary, C rows of one chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_CHUNK_ROWS = 256


class _FrozenHeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, output_AD: Tensor, head_UD: Tensor, expected_AD: Tensor, weight_A: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradient_AD = torch.empty_like(output_AD, dtype=torch.float32)
        loss_A = torch.empty_like(weight_A)
        best_A = torch.empty_like(weight_A, dtype=torch.int64)
        for start in range(0, output_AD.shape[0], _CHUNK_ROWS):
            rows = slice(start, start + _CHUNK_ROWS)
            logits_CU = (output_AD[rows].to(head_UD.dtype) @ head_UD.T).float()
            top_C, best_A[rows] = logits_CU.max(dim=-1)
            p_CU = logits_CU.sub_(top_C[:, None]).exp_()
            total_C = p_CU.sum(-1)
            mean_CD = (p_CU.to(head_UD.dtype) @ head_UD).float() / total_C[:, None]
            loss_A[rows] = top_C + total_C.log() - (output_AD[rows].float() * expected_AD[rows]).sum(-1)
            gradient_AD[rows] = (mean_CD - expected_AD[rows]) * weight_A[rows, None]
        ctx.save_for_backward(gradient_AD)
        ctx.mark_non_differentiable(loss_A, best_A)
        return (loss_A * weight_A).sum(), loss_A, best_A

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        (gradient_AD,) = ctx.saved_tensors
        return gradient_AD * grads[0], None, None, None


def soft_cross_entropy(
    output_AD: Tensor, head_UD: Tensor, expected_AD: Tensor, weight_A: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(weighted sum of losses, loss of each anchor [A] in nats, draft's most likely draft id [A]).

    Only the sum carries a gradient, and only to output_AD. expected_AD comes from `drafter.teacher`; weight_A is 0 for
    anchors that are not valid at this depth.
    """
    result: tuple[Tensor, Tensor, Tensor] = _FrozenHeadLoss.apply(output_AD, head_UD, expected_AD, weight_A)
    return result
