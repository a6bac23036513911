"""The loss written down plainly, anchor by anchor, over whole distributions. Tests hold `drafter.losses` to it.

Shape letters: D hidden, U draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def soft_cross_entropy_of(output_D: Tensor, target_hidden_D: Tensor, head_UD: Tensor, hard_weight: float = 0.0) -> Tensor:
    """-sum_u p_u log q_u, nats, for one anchor: p the target's distribution on the draft vocabulary, q the draft's."""
    p_U = torch.softmax(head_UD @ target_hidden_D, dim=0)
    best_U = torch.zeros_like(p_U)
    best_U[p_U.argmax()] = 1.0
    mixed_U = (1 - hard_weight) * p_U + hard_weight * best_U
    log_q_U = torch.log_softmax(head_UD @ output_D, dim=0)
    return -(mixed_U * log_q_U).sum()


def unrolled_loss(losses: list[list[Tensor]], weights: list[list[float]]) -> Tensor:
    """Weighted mean over depths and anchors, both given as [depth][anchor]."""
    total = torch.stack(
        [loss * weight for row, row_w in zip(losses, weights, strict=True) for loss, weight in zip(row, row_w, strict=True)]
    )
    return total.sum() / sum(sum(row) for row in weights)
