"""Ranks: the processes one trainer is made of. Here the only one; several are `rl.trainer.sharded`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rl.trainer.packs import Pack


class OneRank:
    rank = 0
    size = 1

    def __init__(self) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def shard(self, model: Any) -> None:
        """Take the rank's part of the parameters, before there is an optimiser of them."""

    def deal(self, packs: Sequence[Pack]) -> list[tuple[Pack, bool]]:
        """The rank's packs. False: computed without counting, because a rank must not have fewer passes than the others."""
        mine = [(pack, True) for pack in packs[self.rank :: self.size]]
        num_passes = -(-len(packs) // self.size)
        return mine + [(packs[0], False)] * (num_passes - len(mine))

    def total(self, amount: Tensor) -> Tensor:
        """Summed over ranks."""
        return amount

    def whole(self, tensor: Tensor) -> Tensor:
        """All of a tensor whose part the rank holds; every rank asks for it."""
        return tensor

    def part(self, whole: Tensor, like: Tensor) -> Tensor:
        """What the rank holds of a whole tensor, cut as `like` is. Raises ValueError for another shape."""
        if whole.shape != like.shape:
            raise ValueError(f"a tensor has shape {list(whole.shape)}, {list(like.shape)} is needed")
        return whole
