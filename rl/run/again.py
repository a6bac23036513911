"""`paceline rl replay`: one step of a run made again from disk, without engines, and whether it comes out as it did."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from rl.config import RunSettings
from rl.run.directory import RunDirectory
from rl.trainer.checkpoint import Checkpoints
from rl.trainer.dumps import Dumps, replay
from rl.trainer.trainer import Trainer
from wire.errors import ConfigError, TrainerError


def replay_step(state_dir: Path, name: str, target_dir: Path, number: int) -> Iterator[str]:
    """The step's report as lines of JSON, and how it differs from the one on disk. number: from 1, as a run's lines tell it.

    Raises ConfigError where there is no such run or number, TrainerError where the batches since a checkpoint before it are gone.
    """
    if number < 1:
        raise ConfigError(f"--step counts from 1, as a run's lines number its steps, got {number}")
    directory = RunDirectory.of(state_dir, name)
    if not directory.settings.is_file():
        raise ConfigError(f"no run called {name!r} in {state_dir / 'rl'}; begin one with `paceline rl run CONFIG`")
    settings = RunSettings.read_json(directory.settings)
    trainer = Trainer(target_dir, settings.trainer, settings.algorithm)
    checkpoints = Checkpoints(directory.checkpoints, num_kept=settings.trainer.num_checkpoints)
    dumps = Dumps(directory.dumps, num_kept=settings.trainer.num_dumps)
    try:
        made = replay(trainer, checkpoints, dumps, number - 1)
    except TrainerError as error:
        raise TrainerError(f"step {number} is number {number - 1} on disk: {error}") from error
    yield msgspec.json.format(msgspec.json.encode(made), indent=2).decode()
    try:
        told = dumps.report(number - 1)
    except TrainerError as error:
        yield f"there is nothing to compare it with: {error}"
        return
    differing = [field for field in made.__struct_fields__ if getattr(made, field) != getattr(told, field)]
    yield (
        f"it differs from what the run told in {', '.join(differing)}"
        if differing
        else "it is what the run told, to the last bit"
    )
