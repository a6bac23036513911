"""What training needs to know of other processes. `OneRank` is the answer where there are none; `learner.sharded` has the other.

A rank is one of the processes that train together. A part is a rank's share of a tensor's rows, the whole is all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from drafter.model import DraftCore

T = TypeVar("T")
CPU = torch.device("cpu")


class OneRank:
    """The only process: a part is the whole, a sum has one summand, and there is nobody to agree with."""

    def __init__(self, device: torch.device = CPU) -> None:
        self.device = device
        """Where weights are and matrix products are computed."""

    def shard(self, core: DraftCore) -> None:
        """Keep only this rank's part of every parameter. Called once, before anything refers to the parameters."""

    def local(self, tensor: Tensor) -> Tensor:
        """The part this rank holds of a parameter, or of anything made like one; the same memory."""
        return tensor

    def whole(self, tensor: Tensor) -> Tensor:
        """The whole of a tensor the ranks hold parts of. All ranks call it together."""
        return tensor

    def part(self, whole: Tensor, like: Tensor) -> Tensor:
        """The inverse of `whole`: held in parts as `like` is."""
        return whole

    def total(self, amount: Tensor) -> Tensor:
        """Sum over the ranks. All ranks call it together."""
        return amount

    def attempt(self, work: Callable[[], T]) -> T:
        """Do it on every rank, or raise on every rank: where one fails the others must not wait for it in the next sum."""
        return work()

    def map_wholes(
        self, function: Callable[[Tensor], Tensor], parts: Iterable[Tensor], like: Sequence[Tensor]
    ) -> Iterable[Tensor]:
        """This rank's parts of `function` of whole matrices, given its parts of them; `like` are the parameters they belong to."""
        return map(function, parts)
