"""Dumps: each batch on disk before it is learned from, and its report after, so that a bad step can be made again without engines."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from rl.rewards.claims import Pair
from rl.trainer.checkpoint import Checkpoints
from rl.trainer.metrics import StepReport
from rl.trainer.trainer import Trainer
from rl.trajectory import Group
from wire.errors import TrainerError
from wire.spec import SCHEMA_VERSION, fsync_path


class BatchDump(Struct, frozen=True, kw_only=True, tag="batch_dump"):
    schema_version: int = SCHEMA_VERSION
    step: int
    version: int
    """Of the target whose weights take it up."""
    groups: tuple[Group, ...]
    pairs: tuple[Pair, ...] = ()
    """What the reward model learns in that step."""


class Dumps:
    """A directory of `<step>.batch` and `<step>.json`, of which the newest `num_kept` steps are kept. One process writes."""

    def __init__(self, directory: Path, *, num_kept: int) -> None:
        self.directory, self._num_kept = directory, num_kept

    def steps(self) -> list[int]:
        """Whose batches are there, ascending."""
        paths = self.directory.glob("*.batch") if self.directory.is_dir() else []
        return sorted(int(path.stem) for path in paths if path.stem.isdecimal())

    def write(self, trainer: Trainer, groups: Sequence[Group], pairs: Sequence[Pair] = ()) -> None:
        """The batch that trainer and reward model are about to learn from; what there is of later ones is of steps that a run went back on, and goes.

        Raises OSError on a full disk.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        dump = BatchDump(step=trainer.num_steps, version=trainer.version, groups=tuple(groups), pairs=tuple(pairs))
        self._report(dump.step).unlink(missing_ok=True)
        _replace(self._batch(dump.step), msgspec.msgpack.encode(dump))
        steps = self.steps()
        kept = [step for step in steps if step <= dump.step][-self._num_kept :]
        for step in set(steps) - set(kept):
            self._report(step).unlink(missing_ok=True)
            self._batch(step).unlink()

    def write_report(self, report: StepReport) -> None:
        _replace(self._report(report.step), msgspec.json.encode(report))

    def batch(self, step: int) -> BatchDump:
        """Raises TrainerError where it is gone or damaged."""
        try:
            found = msgspec.msgpack.decode(self._batch(step).read_bytes(), type=BatchDump)
        except (OSError, msgspec.DecodeError) as error:
            raise TrainerError(f"the batch of step {step} cannot be read: {error}") from error
        _require_schema(f"the batch of step {step}", found.schema_version)
        return found

    def report(self, step: int) -> StepReport:
        """What the step said when it was made; raises TrainerError where it said nothing or the file is damaged."""
        try:
            found = msgspec.json.decode(self._report(step).read_bytes(), type=StepReport)
        except (OSError, msgspec.DecodeError) as error:
            raise TrainerError(f"the report of step {step} cannot be read: {error}") from error
        _require_schema(f"the report of step {step}", found.schema_version)
        return found

    def _batch(self, step: int) -> Path:
        return self.directory / f"{step}.batch"

    def _report(self, step: int) -> Path:
        return self.directory / f"{step}.json"


def replay(trainer: Trainer, checkpoints: Checkpoints, dumps: Dumps, step: int) -> StepReport:
    """Make a step again, from the newest checkpoint before it and the batches since. A new trainer of the run's own settings wanted.

    On the machine and with the number of threads and ranks of the run it is the same step, on CPUs to the last bit. Raises TrainerError
    where a batch is gone that is needed.
    """
    checkpoints.restore(trainer, at_most=step)
    needed = range(trainer.num_steps, step + 1)
    missing = sorted(set(needed) - set(dumps.steps()))
    if missing or not needed:
        raise TrainerError(
            f"step {step} cannot be made again: the checkpoint before it is of step {trainer.num_steps} and batches {missing} are "
            "gone; keep more dumps (num_dumps) or checkpoints (num_checkpoints)"
        )
    for each in needed:
        batch = dumps.batch(each)
        trainer.version = batch.version
        report = trainer.step(batch.groups)
    return report


def _require_schema(what: str, version: int) -> None:
    if version != SCHEMA_VERSION:
        raise TrainerError(
            f"{what} is of schema {version}, this release reads {SCHEMA_VERSION}; replay it with the release that wrote it"
        )


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    fsync_path(path.parent)
