"""Training on several processes: parameters, gradients and optimiser state in parts by FSDP2 (torch's `fully_shard`).

Each rank computes the gradient of its share of the batch. FSDP2 gathers the parameters before the forward and sums the
gradients into parts after the backward; what is local to an element (momentum, AdamW, the average) stays in parts. Muon needs
whole matrices, so each matrix has an owner, which orthogonalises it for all: one exchange brings the parts to the owners,
another brings the results back ("Muon is scalable for LLM training", Liu et al. 2025, section on distributed Muon).

Shape letters: R rows of a matrix, C its columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from drafter.model import DraftCore
from learner.ranks import CPU, OneRank

T = TypeVar("T")


class ShardedRanks(OneRank):
    """One rank of the default process group, which must exist."""

    def __init__(self, device: torch.device = CPU) -> None:
        super().__init__(device)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._mesh = init_device_mesh(self.device.type, (self.size,))
        self._core: FSDPModule | None = None

    def shard(self, core: DraftCore) -> None:
        sharded: Any = fully_shard(core, mesh=self._mesh)
        # The loss of a rank is its sum over the weight of the whole batch: the gradient is the sum over ranks, not the mean.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        register_fsdp_forward_method(sharded, "unroll")
        self._core = sharded

    def local(self, tensor: Tensor) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def part(self, whole: Tensor, like: Tensor) -> Tensor:
        """Raises ValueError for another shape."""
        if whole.shape != like.shape:
            raise ValueError(f"a tensor has shape {tuple(whole.shape)}, needed {tuple(like.shape)}")
        if not isinstance(like, DTensor):
            return whole
        return distribute_tensor(whole.to(self.device), like.device_mesh, like.placements, src_data_rank=None)

    def total(self, amount: Tensor) -> Tensor:
        summed = amount.detach().to(self.device, copy=True)
        dist.all_reduce(summed)
        return summed

    def attempt(self, work: Callable[[], T]) -> T:
        error: Exception | None = None
        try:
            value = work()
        except (ArithmeticError, IndexError, RuntimeError, ValueError) as caught:
            error = caught
        if self.total(torch.tensor(float(error is not None))) == 0:
            return value
        if self._core is not None:
            self._core.reset_iter_state()  # a forward without its backward leaves the parameters gathered
        raise error or RuntimeError("another process could not compute its share of the batch")

    def map_wholes(
        self, function: Callable[[Tensor], Tensor], parts: Iterable[Tensor], like: Sequence[Tensor]
    ) -> Iterable[Tensor]:
        shapes = [tensor.shape for tensor in like]
        owned = _owned(shapes, self.size)
        mine = owned[self.rank]
        local = list(parts)
        outgoing = [[local[index] for index in indices] for indices in owned]
        rows = [[_row_range(shapes[index][0], rank, self.size) for index in mine] for rank in range(self.size)]
        held = [[torch.Size((len(r), shapes[i][1])) for r, i in zip(ranges, mine, strict=True)] for ranges in rows]
        arrived = self._exchange(outgoing, held)
        results = [function(torch.cat(pieces)) for pieces in zip(*arrived, strict=True)]
        replies = [[whole_RC[r.start : r.stop] for r, whole_RC in zip(ranges, results, strict=True)] for ranges in rows]
        returned = self._exchange(replies, [[local[index].shape for index in indices] for indices in owned])
        by_index = {
            i: part for indices, pieces in zip(owned, returned, strict=True) for i, part in zip(indices, pieces, strict=True)
        }
        return [by_index[index] for index in range(len(local))]

    def _exchange(self, outgoing: list[list[Tensor]], incoming: list[list[torch.Size]]) -> list[list[Tensor]]:
        """Send `outgoing[rank]` to each rank; returns what each sent, of the shapes `incoming[rank]`. All float32."""
        sent = torch.cat([torch.zeros(0, device=self.device), *(piece.flatten() for pieces in outgoing for piece in pieces)])
        sent_sizes = [sum(piece.numel() for piece in pieces) for pieces in outgoing]
        received_sizes = [sum(shape.numel() for shape in shapes) for shapes in incoming]
        received = sent.new_empty(sum(received_sizes))
        dist.all_to_all_single(received, sent, received_sizes, sent_sizes)
        flat = iter(received.split([shape.numel() for shapes in incoming for shape in shapes]))
        return [[next(flat).view(shape) for shape in shapes] for shapes in incoming]


def _owned(shapes: Sequence[torch.Size], num_ranks: int) -> list[list[int]]:
    """Which matrices each rank orthogonalises: the costliest first, each to the rank with the least work so far."""
    costs = [shape.numel() * min(shape) for shape in shapes]
    owned: list[list[int]] = [[] for _ in range(num_ranks)]
    work = [0] * num_ranks
    for index in sorted(range(len(shapes)), key=lambda index: -costs[index]):
        rank = work.index(min(work))
        owned[rank].append(index)
        work[rank] += costs[index]
    return owned


def _row_range(num_rows: int, rank: int, num_ranks: int) -> range:
    """Rows of a matrix that a rank holds: equal chunks, the last ones shorter or empty, as FSDP2 cuts them."""
    chunk = -(-num_rows // num_ranks)
    return range(min(chunk * rank, num_rows), min(chunk * (rank + 1), num_rows))
