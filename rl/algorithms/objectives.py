"""What is made larger at each token. r is the policy's ratio pi_theta / pi_old, A the advantage.

Each returns the objective and the ratio that was held to [1 - low, 1 + high].

Shape letters: B sequences, T token positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl.algorithms.config import Recipe

_MAX_LOG_RATIO = 20.0
"""e^20 is far beyond every clip; without it one token gone from impossible to likely overflows the loss."""


def objective(
    recipe: Recipe, current_BT: Tensor, proximal_BT: Tensor, advantage_B: Tensor, mask_BT: Tensor
) -> tuple[Tensor, Tensor]:
    """(objective [B, T], ratio [B, T]); both are 0 and 1 outside the mask."""
    zero = current_BT.new_zeros(())
    advantage_BT = advantage_B[:, None] * mask_BT
    log_ratio_BT = bounded(torch.where(mask_BT, current_BT - proximal_BT, zero))
    match recipe.objective:
        case "clip":
            ratio_BT = log_ratio_BT.exp()
            return clipped(ratio_BT, advantage_BT, recipe.clip_low, recipe.clip_high), ratio_BT
        case "gspo":
            ratio_BT = sequence_ratio(log_ratio_BT, mask_BT)
            return clipped(ratio_BT, advantage_BT, recipe.clip_low, recipe.clip_high), ratio_BT
        case "cispo":
            ratio_BT = log_ratio_BT.exp()
            logprob_BT = torch.where(mask_BT, current_BT, zero)
            return cispo(ratio_BT, logprob_BT, advantage_BT, recipe.clip_low, recipe.clip_high), ratio_BT


def clipped(ratio_BT: Tensor, advantage_BT: Tensor, low: float, high: float) -> Tensor:
    """min(r A, clip(r, 1 - low, 1 + high) A). PPO (arXiv 1707.06347, eq. 7); two limits: DAPO (arXiv 2503.14476, eq. 8)."""
    return torch.minimum(ratio_BT * advantage_BT, ratio_BT.clamp(1.0 - low, 1.0 + high) * advantage_BT)


def cispo(ratio_BT: Tensor, logprob_BT: Tensor, advantage_BT: Tensor, low: float, high: float) -> Tensor:
    """sg(clip(r)) A log pi: clipped tokens keep their gradient, only its weight is limited. MiniMax-M1 (arXiv 2506.13585)."""
    return ratio_BT.detach().clamp(1.0 - low, 1.0 + high) * advantage_BT * logprob_BT


def sequence_ratio(log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The geometric mean of a sequence's ratios, at each of its tokens. GSPO (arXiv 2507.18071, eq. 7).

    A forked rollout's trajectories have each their own: they need not be computed together.
    """
    mean_B = log_ratio_BT.sum(-1) / mask_BT.sum(-1).clamp(min=1)
    return mean_B.exp()[:, None].expand_as(log_ratio_BT)


def bounded(log_ratio_BT: Tensor) -> Tensor:
    return log_ratio_BT.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def clip_activity(recipe: Recipe, ratio_BT: Tensor, advantage_BT: Tensor) -> tuple[Tensor, Tensor]:
    """(held from above, held from below) [B, T]: where the limit decides.

    The minimum of `clipped` leaves one side of it by the advantage's sign; CISPO limits the weight whatever the sign.
    """
    above_BT, below_BT = ratio_BT > 1.0 + recipe.clip_high, ratio_BT < 1.0 - recipe.clip_low
    if recipe.objective == "cispo":
        return (advantage_BT != 0) & above_BT, (advantage_BT != 0) & below_BT
    return (advantage_BT > 0) & above_BT, (advantage_BT < 0) & below_BT
