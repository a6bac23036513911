"""Training on several processes: parameters, gradients and the optimiser's state in parts by FSDP2 (torch's `fully_shard`).

Every rank is given the same batch and computes its packs. FSDP2 gathers a layer's parameters before its forward pass and sums the
gradients into parts after its backward; shares of the loss are of the whole batch, so that the sum is the batch's gradient.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from rl.trainer.ranks import OneRank


class ShardedRanks(OneRank):
    """One rank of the default process group, which must exist. On GPUs where there are some, else on CPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        if self.device.type == "cuda":
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
        self._mesh = init_device_mesh(self.device.type, (self.size,))

    def shard(self, model: Any) -> None:
        """Layer by layer, so that only one is whole at a time; what is outside of them together."""
        for module in [*_layers(model), model]:
            # The outermost too, whose parameters would stay whole after a pass without gradient, and be whole to the optimiser.
            sharded: Any = fully_shard(module, mesh=self._mesh, reshard_after_forward=True)
            # A rank's loss is its part of the batch's: gradients add up, they are not averaged.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)

    def total(self, amount: Tensor) -> Tensor:
        summed = amount.detach().to(self.device, copy=True)
        dist.all_reduce(summed)
        return summed

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def part(self, whole: Tensor, like: Tensor) -> Tensor:
        super().part(whole, like)
        if not isinstance(like, DTensor):
            return whole
        return distribute_tensor(whole.to(self.device), like.device_mesh, like.placements, src_data_rank=None)


def _layers(model: Any) -> list[Any]:
    """The decoder's layers: the longest list of modules, which is the one all such models have."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return list(max(lists, key=len, default=[]))
