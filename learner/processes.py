"""A learner of several processes, started by torchrun: rank 0 leads, the others follow. They live and die together."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
from collections.abc import Callable
from functools import partial

import torch
from torch import distributed as dist

from drafter.target import load_target_parts
from learner.config import LearnerConfig
from learner.device import choose_device
from learner.follow import follow
from learner.lead import LeadingTrainer
from learner.orders import OrderChannel, Stop
from learner.session import MakeTrainer
from learner.sharded import ShardedRanks
from wire.errors import ConfigError

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


def run_rank(config: LearnerConfig, lead: Callable[[LearnerConfig, MakeTrainer], int]) -> int:
    """This process's part until the leading rank is told to stop; returns the exit status.

    Raises ConfigError where it was not started as one of `learner.num_processes`, RuntimeError where another rank is gone.
    """
    num_started = int(os.environ.get("WORLD_SIZE", "1"))
    if num_started != config.learner.num_processes:
        raise ConfigError(
            f"learner.num_processes is {config.learner.num_processes} and {num_started} were started; start the learner with "
            "`paceline up`, or with torchrun --nproc-per-node"
        )
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = choose_device(config.learner.device, num_gpus=torch.cuda.device_count(), rank=rank)
    # torchrun gives each of its processes a session of its own: nobody else would end them if it was killed.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    ranks, channel = ShardedRanks(device), OrderChannel()
    status = 0
    if ranks.rank > 0:
        for number in (signal.SIGTERM, signal.SIGINT):  # the leading rank gets it too, and needs the others for its checkpoint
            signal.signal(number, signal.SIG_IGN)
        follow(load_target_parts(config.target_dir), config.learner.train, ranks, channel)
    else:
        status = lead(config, partial(LeadingTrainer, ranks=ranks, channel=channel))
        for rank in range(1, ranks.size):
            channel.send(Stop(), rank)
    dist.destroy_process_group()
    return status
