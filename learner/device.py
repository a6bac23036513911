"""Where the learner computes: weights, optimiser and judgements are on one device, requests stay in host memory."""

from __future__ import annotations

import torch

from learner.config import DeviceChoice
from wire.errors import ConfigError


def choose_device(wanted: DeviceChoice, *, num_gpus: int, rank: int = 0) -> torch.device:
    """The device of one learner process on this machine; `auto` is a GPU where torch has one. Raises ConfigError without enough GPUs."""
    if wanted == "cpu" or (wanted == "auto" and num_gpus == 0):
        return torch.device("cpu")
    if rank >= num_gpus:
        raise ConfigError(
            f"learner.device is {wanted!r}: process {rank} needs a GPU of its own and torch has {num_gpus}; lower "
            "learner.num_processes, or set learner.device to 'cpu'"
        )
    return torch.device("cuda", rank)
