"""How much of the loss each token is. Shares of the whole batch are made before it is split, so that the losses of its parts
add up to the loss of the whole, on however many devices.

What the papers call a sequence is a rollout: where a conversation was forked, it has several sequences, which weigh together as
one. `shares_reference` states it plainly. Shape letters: B sequences, T token positions, N rollouts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl.algorithms.config import Share
from wire.errors import RolloutError


def shares(kind: Share, mask_BT: Tensor, rollouts_B: Tensor, max_tokens: int) -> Tensor:
    """Share [B, T], float32, 0 outside the mask. rollouts_B numbers each sequence's rollout, int64.

    max_tokens: the most tokens a rollout can have; RolloutError where one has more.
    """
    lengths_B, num_rollouts = rollout_lengths(mask_BT, rollouts_B)
    if int(lengths_B.max()) > max_tokens:
        raise RolloutError(
            f"an answer has {int(lengths_B.max())} tokens where {max_tokens} are allowed; give the run's own limit"
        )
    match kind:
        case "token":
            return token_share(mask_BT)
        case "sequence":
            return sequence_share(mask_BT, lengths_B, num_rollouts)
        case "constant":
            return constant_share(mask_BT, num_rollouts, max_tokens)


def rollout_lengths(mask_BT: Tensor, rollouts_B: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens of each sequence's rollout [B], rollouts that have any []), int64."""
    names_N, index_B = torch.unique(rollouts_B, return_inverse=True)
    lengths_N = index_B.new_zeros(names_N.shape[0]).index_add(0, index_B, mask_BT.sum(-1))
    return lengths_N[index_B], (lengths_N > 0).sum()


def token_share(mask_BT: Tensor) -> Tensor:
    """Every token of the batch alike. DAPO (arXiv 2503.14476, eq. 8): long answers are not softened."""
    return mask_BT.float() / mask_BT.sum().clamp(min=1)


def sequence_share(mask_BT: Tensor, lengths_B: Tensor, num_rollouts: Tensor) -> Tensor:
    """Every rollout alike, and its tokens among themselves. GRPO (arXiv 2402.03300, eq. 3)."""
    return mask_BT.float() / lengths_B[:, None].clamp(min=1) / num_rollouts.clamp(min=1)


def constant_share(mask_BT: Tensor, num_rollouts: Tensor, max_tokens: int) -> Tensor:
    """A rollout of n tokens is n / max_tokens of a rollout's part. Dr.GRPO (arXiv 2503.20783)."""
    return mask_BT.float() / (max_tokens * num_rollouts.clamp(min=1))
