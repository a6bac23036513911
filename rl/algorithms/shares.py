"""How much of the loss each token is. Shares of the whole batch are made before it is split, so that the losses of its parts
add up to the loss of the whole, on however many devices.

Shape letters: B sequences, T token positions.
"""

from __future__ import annotations

from torch import Tensor

from rl.algorithms.config import Share
from wire.errors import RolloutError


def shares(kind: Share, mask_BT: Tensor, max_tokens: int) -> Tensor:
    """Share [B, T], float32, 0 outside the mask. max_tokens: the longest answer there can be; RolloutError where one is longer."""
    lengths_B = mask_BT.sum(-1)
    if int(lengths_B.max()) > max_tokens:
        raise RolloutError(
            f"an answer has {int(lengths_B.max())} tokens where {max_tokens} are allowed; give the run's own limit"
        )
    match kind:
        case "token":
            return token_share(mask_BT)
        case "sequence":
            return sequence_share(mask_BT)
        case "constant":
            return constant_share(mask_BT, max_tokens)


def token_share(mask_BT: Tensor) -> Tensor:
    """Every token of the batch alike. DAPO (arXiv 2503.14476, eq. 8): long answers are not softened."""
    return mask_BT.float() / mask_BT.sum().clamp(min=1)


def sequence_share(mask_BT: Tensor) -> Tensor:
    """Every sequence alike, and its tokens among themselves. GRPO (arXiv 2402.03300, eq. 3)."""
    lengths_B = mask_BT.sum(-1, keepdim=True)
    return mask_BT.float() / lengths_B.clamp(min=1) / (lengths_B > 0).sum().clamp(min=1)


def constant_share(mask_BT: Tensor, max_tokens: int) -> Tensor:
    """A sequence of n tokens is n / max_tokens of a sequence's part. Dr.GRPO (arXiv 2503.20783)."""
    return mask_BT.float() / (max_tokens * (mask_BT.sum(-1) > 0).sum().clamp(min=1))
