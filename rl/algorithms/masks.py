"""Importance correction: what a token counts for that the engine drew from mu where the trainer sees pi.

rho = pi / mu per token. It holds both gaps between the two, other arithmetic and older weights. None of this has a gradient.

Shape letters: B sequences, T token positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl.algorithms.config import CorrectionSettings
from rl.algorithms.objectives import bounded


def importance_weights(settings: CorrectionSettings, tokens_BT: Tensor, behaviour_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Weight [B, T] by token, without the sequence masks. tokens_BT: the trainer's log-probabilities, old policy's."""
    rho_BT = log_rho(tokens_BT, behaviour_BT, mask_BT).exp()
    match settings.token_weight:
        case "truncate":
            return truncated(rho_BT, settings.importance_cap)
        case "band":
            return banded(rho_BT, *settings.token_band)
        case "none":
            return torch.ones_like(rho_BT)


def log_rho(policy_BT: Tensor, behaviour_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """log(pi / mu) [B, T], 0 outside the mask, without gradient."""
    return bounded(torch.where(mask_BT, policy_BT.detach() - behaviour_BT, behaviour_BT.new_zeros(())))


def truncated(rho_BT: Tensor, cap: float) -> Tensor:
    """min(rho, C). Truncated importance sampling (Ionides 2008; Yao et al., "Your efficient RL framework ...", 2025)."""
    return rho_BT.clamp(max=cap)


def banded(rho_BT: Tensor, low: float, high: float) -> Tensor:
    """rho inside [low, high], else 0. IcePop (Ling team, "Small leak can sink a great ship", 2025)."""
    return rho_BT * ((rho_BT >= low) & (rho_BT <= high))


def geometric_mask(log_rho_BT: Tensor, mask_BT: Tensor, low: float, high: float) -> Tensor:
    """[B]: whether the geometric mean of a sequence's rho is inside [low, high].

    Masked importance sampling (Liu et al., "When speed kills stability", 2025).
    """
    mean_B = sequence_mean(log_rho_BT, mask_BT).exp()
    return (mean_B >= low) & (mean_B <= high)


def off_policy_mask(log_rho_BT: Tensor, mask_BT: Tensor, advantage_B: Tensor, delta: float) -> Tensor:
    """[B]: not (A < 0 and mean log(mu / pi) > delta). DeepSeek-V3.2 (arXiv 2512.02556, eq. 9).

    pi is the current policy: what it has moved away from already is not pushed further.
    """
    return ~((advantage_B < 0) & (-sequence_mean(log_rho_BT, mask_BT) > delta))


def sequence_mean(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """[B], over the tokens of the mask; 0 for a sequence without any."""
    return (values_BT * mask_BT).sum(-1) / mask_BT.sum(-1).clamp(min=1)
