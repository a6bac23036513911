"""Where a run keeps itself: `<state>/rl/<name>/`, one process at a time.

checkpoints/  dumps/     the trainer's (`rl/trainer/checkpoint.py`, `dumps.py`)
groups/                  finished groups
record                   ledger and open groups, after every finished group and every step, and each second in which rollouts finish
history.jsonl            what became of each group
metrics.jsonl            what each step was
heldout.jsonl            what held-out problems earned
settings.json            of the process that ran last
lock                     held while a process runs it
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rl.run.finished import FinishedGroups
from rl.run.heldout import HeldoutResult
from rl.run.history import GroupEvent
from rl.run.lines import Lines
from rl.run.metrics import StepMetrics
from wire.errors import ConfigError
from wire.lock_file import is_locked, take_lock


@dataclass(frozen=True)
class RunDirectory:
    root: Path

    @classmethod
    def of(cls, state_dir: Path, name: str) -> RunDirectory:
        return cls(state_dir / "rl" / name)

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def dumps(self) -> Path:
        return self.root / "dumps"

    @property
    def record(self) -> Path:
        return self.root / "record"

    @property
    def settings(self) -> Path:
        return self.root / "settings.json"

    @property
    def finished(self) -> FinishedGroups:
        return FinishedGroups(self.root / "groups")

    @property
    def history(self) -> Lines[GroupEvent]:
        return Lines(self.root / "history.jsonl", GroupEvent)

    @property
    def metrics(self) -> Lines[StepMetrics]:
        return Lines(self.root / "metrics.jsonl", StepMetrics)

    @property
    def heldout(self) -> Lines[HeldoutResult]:
        return Lines(self.root / "heldout.jsonl", HeldoutResult)

    def lock(self) -> int:
        """Make it this process's; closed with the descriptor or the process. Raises ConfigError where another one has it."""
        self.root.mkdir(parents=True, exist_ok=True)
        handle = take_lock(self._lock_file)
        if handle is None:
            raise ConfigError(
                f"the run {self.root.name} is going on in another process; end that, or give this one a name of its own (rl.name)"
            )
        return handle

    def is_locked(self) -> bool:
        """Whether a process runs it."""
        return is_locked(self._lock_file)

    @property
    def _lock_file(self) -> Path:
        return self.root / "lock"
