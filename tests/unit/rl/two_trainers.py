"""The same run for a trainer of one process and of several; as a program, under torchrun, of several: `two_trainers.py DIRECTORY`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[3]), str(Path(__file__).parents[1])]

from tiny_policy import make_settings, make_sink

from rl.staleness.ledger import LedgerState
from rl.trainer.checkpoint import Checkpoints
from rl.trainer.metrics import StepReport
from rl.trainer.ranks import OneRank
from rl.trainer.trainer import Trainer
from rl.trajectory import Group
from wire.errors import TrainerError

PACK_TOKENS = 9
ALGORITHM = {"kl_weight": 0.05, "correction": {"token_weight": "truncate", "sequence_band": None}}


class Full:
    """The disk is full."""

    canary_token_ids: tuple[int, ...] = ()

    def write(self, state: Mapping[str, torch.Tensor], canary_logprobs: Sequence[float], *, num_updates: int) -> int:
        raise OSError("no space")


def new_trainer(directory: Path, ranks: OneRank) -> Trainer:
    settings, algorithm = make_settings(
        ALGORITHM, num_minibatches=2, pack_tokens=PACK_TOKENS, clip_norm=0.05, learning_rate=3e-3
    )
    return Trainer(directory / "model", settings, algorithm, ranks=ranks)


def train(trainer: Trainer, batches: Sequence[Sequence[Group]], directory: Path) -> list[StepReport]:
    """Steps, a version, a checkpoint half-way, gone back to at the end."""
    checkpoints = Checkpoints(directory / "checkpoints", num_kept=1)
    reports = [trainer.step(batch) for batch in batches[:2]]
    checkpoints.save(trainer, LedgerState(version=0))
    with pytest.raises(OSError if trainer.ranks.rank == 0 else TrainerError):
        trainer.publish(Full())
    trainer.publish(make_sink(directory, directory / "model"))
    reports.append(trainer.step(batches[2]))
    trainer.ranks.total(torch.zeros(1))  # the checkpoint is written by now
    checkpoints.restore(trainer)
    trainer.version = 1
    reports.extend(trainer.step(batch) for batch in batches[2:])
    return reports


def main(directory: Path) -> None:
    from torch import distributed as dist

    from rl.trainer.sharded import ShardedRanks

    dist.init_process_group("gloo")
    batches = msgspec.msgpack.decode((directory / "batches").read_bytes(), type=list[list[Group]])
    trainer = new_trainer(directory, ShardedRanks())
    reports = train(trainer, batches, directory / "together")
    tensors = trainer.tensors()
    if trainer.ranks.rank == 0:
        (directory / "together" / "reports").write_bytes(msgspec.json.encode(reports))
        save_file(tensors, directory / "together" / "tensors.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
