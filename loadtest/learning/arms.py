"""Systems under comparison: a Paceline with a draft, or stock vLLM with another method of speculation, or with none."""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from loadtest.learning.benchmark import RANDOM, Arm
from loadtest.system import OUR_PARTS, SPECULATION, System, export_draft, lone_engine, running_system, speculating

DRAFT_DIR = "draft"
"""In an arm's directory: the draft that was active at its end, where another arm starts from it."""
_IDLE_LEARNER = ("capture.enabled=false", "learner.enabled=true")
"""A draft that stays as it is. The learner lives, so that engines of all arms have the same cores."""
_METHODS: Mapping[str, Mapping[str, object]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
    "suffix": {"method": "suffix", "num_speculative_tokens": 3},
}
"""Of stock vLLM, at the depth that drafts have by default."""


@dataclass(frozen=True)
class RunningArm:
    """A system that answers at `url`."""

    url: str
    system: System | None = None
    """Of a Paceline; None of anything else."""

    async def keep_draft(self, directory: Path) -> None:
        """The active draft as a checkpoint; raises SystemUnderTestError."""
        assert self.system is not None, "only an arm with a draft gives one"
        active = (await self.system.status()).active_version
        assert active is not None, "a system that serves has an active draft"
        export_draft(self.system.state_dir, active, directory)


Start = Callable[[Arm, Sequence[str]], AbstractAsyncContextManager[RunningArm]]
"""Starts an arm with these settings."""


def why_unavailable(arm: Arm) -> str | None:
    """What this machine lacks for an arm; None where it lacks nothing."""
    if arm.method == "suffix" and importlib.util.find_spec("arctic_inference") is None:
        return "vLLM's suffix decoding needs the package arctic-inference (0.1.1 for vLLM 0.32), which is not installed"
    return None


def settings_of(arm: Arm, common: Sequence[str], out_dir: Path) -> list[str]:
    """All `--set` words of an arm, later ones win."""
    found = [*common]
    if arm.method == "draft":
        if arm.draft != RANDOM:
            checkpoint = arm.draft if "/" in arm.draft else out_dir / arm.draft / DRAFT_DIR
            found.append(f"draft.checkpoint={Path(checkpoint).absolute()}")
        found += () if arm.learns else _IDLE_LEARNER
    return [*found, *arm.settings]


def start_with(up_arguments: Sequence[str]) -> Start:
    """What starts arms for real; `up_arguments` are `--config` and `--set` words of the command line."""

    @asynccontextmanager
    async def start(arm: Arm, settings: Sequence[str]) -> AsyncIterator[RunningArm]:
        if arm.method == "draft":
            async with running_system(up_arguments, settings) as system:
                yield RunningArm(system.url, system)
            return
        method = _METHODS.get(arm.method)
        adding = () if method is None else speculating(method)
        async with lone_engine(up_arguments, settings, without=(*OUR_PARTS, *SPECULATION), adding=adding) as url:
            yield RunningArm(url)

    return start
