"""Rollout of one draft version over engines: stage on all, then commit on each, all or nothing.

This module talks to engines. It does not decide which version should be active.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from server.engines import CONTROL_TIMEOUT_S
from server.errors import EngineRefused
from server.fleet import Engine
from wire.control import CommitReport
from wire.errors import EngineError, SwapError

logger = logging.getLogger(__name__)

MIN_COMMIT_TIMEOUT_S = CONTROL_TIMEOUT_S
"""A commit waits for the step in flight only; staging may not eat up its time."""


class CommitFailed(SwapError):
    """Some engine did not commit. `reverted` holds the engines that had, and were asked to go back."""

    code = "commit_failed"

    def __init__(self, message: str, reverted: list[str]) -> None:
        super().__init__(message)
        self.reverted = reverted


class Deadline:
    """Time left of one swap."""

    def __init__(self, seconds: float) -> None:
        self._end_s = time.monotonic() + seconds

    def left_s(self, at_least: float = 0.05) -> float:
        return max(self._end_s - time.monotonic(), at_least)


async def stage_on_all(engines: Sequence[Engine], version: int, deadline: Deadline) -> None:
    """Every engine holds the artifact, or EngineError with every engine's reason; nothing is active yet."""
    tasks = [engine.client.stage(version, timeout_s=deadline.left_s()) for engine in engines]
    errors: list[EngineError] = []
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, EngineError):
            errors.append(result)
        elif isinstance(result, BaseException):
            raise result
    if not errors:
        return
    message = f"draft {version} was not staged: " + "; ".join(str(error) for error in errors)
    refusal = next((error for error in errors if isinstance(error, EngineRefused)), None)
    raise EngineRefused(refusal.status, message, refusal.code) if refusal else EngineError(message)


async def commit_on_all(engines: Sequence[Engine], version: int, deadline: Deadline) -> dict[str, CommitReport]:
    """Commit on one engine after the other; where one does not, those before it go back and CommitFailed is raised.

    Prefill engines come first: once a decode engine has the new draft, no KV of the old one is made for it any more.
    """
    commits: dict[str, CommitReport] = {}
    took: list[tuple[Engine, int]] = []
    for engine in sorted(engines, key=lambda engine: engine.can_decode):
        before = engine.draft_version
        assert before is not None, "a ready engine has told its version"
        try:
            timeout_s = deadline.left_s(at_least=MIN_COMMIT_TIMEOUT_S)
            commits[engine.id] = await engine.client.commit(version, expected_active=before, timeout_s=timeout_s)
        except EngineError as error:
            _note_failure(engine, error)
            await _take_back(took, version)
            raise CommitFailed(f"draft {version} was not committed: {error}", [engine.id for engine, _ in took]) from error
        engine.draft_version = version
        took.append((engine, before))
    return commits


async def move(engine: Engine, version: int, *, timeout_s: float) -> CommitReport:
    """Stage and commit on one engine; raises EngineError."""
    before = engine.draft_version
    assert before is not None, "an engine is moved after it has told its version"
    deadline = Deadline(timeout_s)
    await engine.client.stage(version, timeout_s=deadline.left_s())
    timeout_s = deadline.left_s(at_least=MIN_COMMIT_TIMEOUT_S)
    report = await engine.client.commit(version, expected_active=before, timeout_s=timeout_s)
    engine.draft_version = version
    return report


async def _take_back(took: list[tuple[Engine, int]], version: int) -> None:
    """In the order they took it, prefill first here too."""
    for engine, before in took:
        try:
            await move(engine, before, timeout_s=MIN_COMMIT_TIMEOUT_S * 2)
        except EngineError as error:
            logger.error("engine %s keeps draft %d for now, going back to %d failed: %s", engine.id, version, before, error)
            engine.request_sync()


def _note_failure(engine: Engine, error: EngineError) -> None:
    """A refusal leaves the engine as it was. Silence leaves it unknown: it must be asked again before it serves."""
    if isinstance(error, EngineRefused):
        engine.request_sync()
    else:
        engine.suspect(f"did not answer a commit: {error}")
