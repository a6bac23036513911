"""Advantages: how much better a rollout was than the others of its prompt.

All of them subtract the group's mean. Dividing by the group's standard deviation (GRPO) makes a difference of 0.01 in a group
weigh as much as one of 1, so it is no default; dividing by the batch's only sets the scale of a step.

Computed in float64: in float32 the mean of equal rewards may differ from them in the last bit, and a division by their standard
deviation makes an advantage of that. Rewards that are all equal have advantage 0 everywhere.

Shape letters: B sequences of the batch, N groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl.algorithms.config import Advantage
from wire.errors import RolloutError

_EPSILON = 1e-6
"""Beside a standard deviation of rewards, which are of order 1."""


def advantages(kind: Advantage, rewards_B: Tensor, groups_B: Tensor, lengths_B: Tensor) -> Tensor:
    """Advantage [B], float32. groups_B numbers each sequence's group, lengths_B counts its tokens.

    Raises RolloutError where shapes differ or a reward is not finite.
    """
    if not rewards_B.shape == groups_B.shape == lengths_B.shape or rewards_B.dim() != 1:
        raise RolloutError(
            f"rewards {list(rewards_B.shape)}, groups {list(groups_B.shape)} and lengths {list(lengths_B.shape)} are of one "
            "dimension and equally long: one entry for each sequence"
        )
    if not bool(torch.isfinite(rewards_B).all()):
        raise RolloutError(f"rewards {rewards_B.tolist()} are not all finite; leave rollouts whose environment failed out")
    centred_B = minus_group_mean(rewards_B.double(), groups_B)
    match kind:
        case "mean":
            result_B = centred_B
        case "group_std":
            result_B = over_group_std(centred_B, groups_B)
        case "batch_std":
            result_B = over_batch_std(centred_B)
        case "token_batch_std":
            result_B = over_token_batch_std(centred_B, lengths_B)
    return result_B.float()


def minus_group_mean(rewards_B: Tensor, groups_B: Tensor) -> Tensor:
    """R - mean of its group. Dr.GRPO (arXiv 2503.20783)."""
    return rewards_B - _group_sum(rewards_B, groups_B) / _group_sum(torch.ones_like(rewards_B), groups_B)


def over_group_std(centred_B: Tensor, groups_B: Tensor) -> Tensor:
    """(R - mean) / sample standard deviation of its group. GRPO (arXiv 2402.03300, §4.1.2); a group of one has none and gets 0."""
    freedom_B = _group_sum(torch.ones_like(centred_B), groups_B) - 1.0
    variance_B = _group_sum(centred_B**2, groups_B) / freedom_B.clamp(min=1.0)
    return centred_B / (variance_B.sqrt() + _EPSILON)


def over_batch_std(centred_B: Tensor) -> Tensor:
    """(R - group mean) / standard deviation of that over the batch. ScaleRL (arXiv 2510.13786)."""
    return centred_B / (centred_B.square().mean().sqrt() + _EPSILON)


def over_token_batch_std(centred_B: Tensor, lengths_B: Tensor) -> Tensor:
    """(R - group mean), normalised over the batch's tokens to mean 0 and standard deviation 1.

    REINFORCE++-baseline (arXiv 2501.03262). Longer answers count more, so that the tokens' mean is 0.
    """
    share_B = lengths_B.to(centred_B) / lengths_B.sum().clamp(min=1)
    shifted_B = centred_B - (share_B * centred_B).sum()
    std = (share_B * shifted_B**2).sum().sqrt()
    return shifted_B / (std + _EPSILON)


def _group_sum(values_B: Tensor, groups_B: Tensor) -> Tensor:
    """[B]: the sum over each entry's group."""
    names_N, index_B = torch.unique(groups_B, return_inverse=True)
    return values_B.new_zeros(names_N.shape[0]).index_add(0, index_B, values_B)[index_B]
