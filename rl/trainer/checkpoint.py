"""Checkpoints: all that a killed run needs to go on as if it had not been killed, one safetensors file each.

Weights, the optimiser's state, the random generator's, counters, the ledger of rollouts, the finished groups that wait and the
unfinished ones are one file: what the ledger says was not trained on is what the weights have not learned from. It is written aside,
flushed and renamed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from msgspec import Struct
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rl.generator.state import GeneratorState
from rl.staleness.ledger import LedgerState
from rl.trainer.trainer import Trainer
from rl.trajectory import Group
from wire.errors import TrainerError
from wire.spec import SCHEMA_VERSION, fsync_path

log = logging.getLogger(__name__)

_SUFFIX = ".safetensors"
_SUPERSEDED = ".superseded"
_PROGRESS = "progress"


class Progress(Struct, frozen=True, kw_only=True, tag="train_progress"):
    """What a checkpoint holds beside the trainer's tensors."""

    schema_version: int = SCHEMA_VERSION
    num_steps: int
    num_updates: int
    version: int
    ledger: LedgerState
    waiting: tuple[Group, ...] = ()
    """Finished groups the ledger counts as waiting."""
    rewards: bytes = b""
    """State of the reward model (`rl.rewards.reward_model`), where there is one."""
    generator: GeneratorState = GeneratorState()
    """What the ledger's running groups have drawn so far."""


class Checkpoints:
    """A directory of `<step>.safetensors`, of which the newest `num_kept` are kept. step: batches taken up before it.

    Ones beyond the step that is saved are of steps a run went back on: they are renamed to `<step>.superseded`, which nothing reads, so
    that no later restore or replay mixes the two courses of the run.
    """

    def __init__(self, directory: Path, *, num_kept: int) -> None:
        self.directory, self._num_kept = directory, num_kept

    def path(self, step: int) -> Path:
        return self.directory / f"{step}{_SUFFIX}"

    def steps(self) -> list[int]:
        """Ascending."""
        paths = self.directory.glob(f"*{_SUFFIX}") if self.directory.is_dir() else []
        return sorted(int(path.stem) for path in paths if path.stem.isdecimal())

    def save(
        self,
        trainer: Trainer,
        ledger: LedgerState,
        waiting: Sequence[Group] = (),
        rewards: bytes = b"",
        generator: GeneratorState = GeneratorState(),
    ) -> None:
        """Raises OSError on a full disk; the older checkpoints are still there then. On several ranks each calls it, one writes."""
        tensors = trainer.tensors()
        if trainer.ranks.rank > 0:
            return
        progress = Progress(
            num_steps=trainer.num_steps,
            num_updates=trainer.num_updates,
            version=trainer.version,
            ledger=ledger,
            waiting=tuple(waiting),
            rewards=rewards,
            generator=generator,
        )
        encoded = torch.frombuffer(bytearray(msgspec.msgpack.encode(progress)), dtype=torch.uint8)
        self.directory.mkdir(parents=True, exist_ok=True)
        for leftover in self.directory.glob("*.tmp"):  # a killed process'; each is as large as a checkpoint
            leftover.unlink()
        _write(
            self.path(trainer.num_steps), {name: tensor.contiguous() for name, tensor in tensors.items()} | {_PROGRESS: encoded}
        )
        for step in self.steps():
            if step > trainer.num_steps:
                self.path(step).rename(self.path(step).with_suffix(_SUPERSEDED))
        for step in self.steps()[: -self._num_kept]:
            self.path(step).unlink()

    def restore(self, trainer: Trainer, *, at_most: int | None = None) -> Progress | None:
        """Bring the trainer to the newest usable checkpoint, not beyond step `at_most`; None where there is none at all.

        Raises TrainerError where there are some and none is usable: beginning anew would throw a run away.
        """
        steps = [step for step in self.steps() if at_most is None or step <= at_most]
        complaints = []
        for step in reversed(steps):
            try:
                return self._restore(trainer, self.path(step))
            except TrainerError as error:
                log.warning("%s", error)
                complaints.append(str(error))
        if complaints:
            raise TrainerError("; ".join(complaints) + f"; move {self.directory} away to begin anew")
        return None

    def _restore(self, trainer: Trainer, path: Path) -> Progress:
        try:
            with safe_open(path, framework="pt") as opened:
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            progress = msgspec.msgpack.decode(tensors.pop(_PROGRESS).numpy().tobytes(), type=Progress)
            if progress.schema_version != SCHEMA_VERSION:
                raise ValueError(f"it is of schema {progress.schema_version}, this release reads {SCHEMA_VERSION}")
            trainer.load(tensors)
        except (OSError, SafetensorError, KeyError, ValueError, RuntimeError, msgspec.DecodeError) as error:
            raise TrainerError(f"checkpoint {path.name} cannot be used: {error}") from error
        trainer.num_steps, trainer.num_updates, trainer.version = progress.num_steps, progress.num_updates, progress.version
        return progress


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    temporary = path.with_suffix(".tmp")
    try:
        save_file(tensors, temporary)
        fsync_path(temporary)
        temporary.rename(path)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise OSError(f"cannot write {path.name}: {error}") from error
    fsync_path(path.parent)
