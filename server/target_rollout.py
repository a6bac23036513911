"""Rollout of one version of the target over engines: stage on all, then commit on each and ask it the canary, all or nothing.

This module talks to engines. It does not decide which version should be active. Unlike a draft, a target changes what users
get: an engine of which nobody can say what it computes with gets no requests until it was asked again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NoReturn

from server.errors import EngineRefused
from server.fleet import Engine
from server.rollout import MIN_COMMIT_TIMEOUT_S, CommitFailed, Deadline
from wire.artifact import WEIGHTS_FILE
from wire.errors import EngineError, SwapError
from wire.target import TargetCanary, TargetManifest
from wire.target_control import TargetCommitReport

logger = logging.getLogger(__name__)

BACK_DEADLINE_S = 2 * MIN_COMMIT_TIMEOUT_S
"""For one engine to go back, whatever is left of the change's own time."""


class CanaryFailed(SwapError):
    """An engine does not say of the canary what the trainer said."""

    code = "target_canary_failed"


@dataclass(slots=True)
class Changes:
    """What came of a rollout, by engine id."""

    commits: dict[str, TargetCommitReport] = field(default_factory=dict)
    canary_errors: dict[str, float] = field(default_factory=dict)


class TargetRollout:
    """One version on its way to the engines."""

    def __init__(
        self, version: int, manifest: TargetManifest | None, deadline: Deadline, *, forget_kv: Callable[[Engine], None]
    ) -> None:
        """`manifest` is None for version 0. `forget_kv` is told of each engine whose KV is gone."""
        self.changes = Changes()
        self._version = version
        self._manifest = manifest
        self._deadline = deadline
        self._forget_kv = forget_kv

    async def run(self, engines: Sequence[Engine]) -> None:
        """Raises EngineError where nothing was changed, CommitFailed where all that were went back."""
        await self._stage_on_all(engines)
        took: list[tuple[Engine, int]] = []
        with no_hand_overs(engines):
            # Prefill engines first: they change only when nobody waits for their KV any more, and so no KV of the old target is
            # left to be pulled when a decode engine changes.
            for engine in sorted(engines, key=lambda engine: engine.can_decode):
                before = engine.target_version
                assert before is not None, "a ready engine has told its version"
                try:
                    await self._commit(engine)
                except EngineError as error:
                    _note_failure(engine, error)
                    await self._fail(took, error)
                took.append((engine, before))
                try:
                    await self._check(engine)
                except (EngineError, CanaryFailed) as error:
                    await self._fail(took, error)

    async def move(self, engine: Engine) -> None:
        """Bring one engine that serves nobody there; raises EngineError or CanaryFailed."""
        await engine.client.stage_target(self._version, timeout_s=self._deadline.left_s())
        await self._commit(engine)
        await self._check(engine)

    async def _commit(self, engine: Engine) -> None:
        before = engine.target_version
        assert before is not None, "an engine is moved after it has told its version"
        report = await engine.client.commit_target(
            self._version, expected_active=before, deadline_s=self._deadline.left_s(at_least=MIN_COMMIT_TIMEOUT_S)
        )
        engine.note_target(self._version)
        self._forget_kv(engine)
        self.changes.commits[engine.id] = report

    async def _check(self, engine: Engine) -> None:
        """By what it read and by what it says of the canary; raises CanaryFailed, or EngineError where it does not answer."""
        if self._manifest is None:
            return
        told, expected = self.changes.commits[engine.id].weights_sha256, self._manifest.sha256[WEIGHTS_FILE]
        if told != expected:
            raise CanaryFailed(f"engine {engine.id} took weights of checksum {told[:12]}…, the manifest says {expected[:12]}…")
        canary = self._manifest.canary
        error = canary.mean_error(await self._score(engine, canary))
        self.changes.canary_errors[engine.id] = error
        if error > canary.max_mean_error:
            raise CanaryFailed(
                f"engine {engine.id} is {error:.3g} nats a token from what the trainer says of the canary, at most "
                f"{canary.max_mean_error:.3g} are allowed; the weights or the arithmetic differ"
            )

    async def _score(self, engine: Engine, canary: TargetCanary) -> list[float]:
        try:
            return await engine.client.score(canary.token_ids, timeout_s=self._deadline.left_s(at_least=MIN_COMMIT_TIMEOUT_S))
        except EngineRefused as error:
            raise CanaryFailed(f"the canary was refused: {error}") from error

    async def _stage_on_all(self, engines: Sequence[Engine]) -> None:
        """Every engine holds the version, or EngineError with every engine's reason; nothing has changed yet."""
        tasks = [engine.client.stage_target(self._version, timeout_s=self._deadline.left_s()) for engine in engines]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        unexpected = next((error for error in errors if not isinstance(error, EngineError)), None)
        if unexpected is not None:
            raise unexpected
        if errors:
            message = f"target {self._version} was not staged: " + "; ".join(str(error) for error in errors)
            refusal = next((error for error in errors if isinstance(error, EngineRefused)), None)
            raise EngineRefused(refusal.status, message, refusal.code) if refusal else EngineError(message)

    async def _fail(self, took: Sequence[tuple[Engine, int]], error: Exception) -> NoReturn:
        """In the order they took it, prefill first here too. The canary is not asked: what served before serves again."""
        for engine, before in took:
            back = TargetRollout(before, None, Deadline(BACK_DEADLINE_S), forget_kv=self._forget_kv)
            try:
                await back.move(engine)
            except EngineError as failure:
                logger.error(
                    "engine %s is still at target %d, going back to %d failed: %s", engine.id, self._version, before, failure
                )
                engine.suspect(f"could not go back to target {before}")
        message = f"target {self._version} was not committed: {error}"
        raise CommitFailed(message, [engine.id for engine, _ in took]) from error


@contextmanager
def no_hand_overs(engines: Sequence[Engine]) -> Iterator[None]:
    """No prefill legs on these engines: KV they hold for others would outlive their target."""
    for engine in engines:
        engine.is_changing = True
    try:
        yield
    finally:
        for engine in engines:
            engine.is_changing = False


def _note_failure(engine: Engine, error: Exception) -> None:
    """A refusal leaves the engine as it was. Silence leaves it unknown: it must be asked again before it serves."""
    if isinstance(error, EngineRefused) and error.status < 500:
        engine.request_sync()
    else:
        engine.suspect("did not change its target as it was asked to")
