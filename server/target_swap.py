"""TargetCoordinator: which version of the target is active, who may change it, and that no engine serves another.

One change at a time, of a draft or of the target; compare-and-swap on the active version; all engines or none. An engine that was
away is brought to the active version before it serves.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from server.errors import NoEngineReady, SwapInProgress
from server.fleet import Engine, Fleet
from server.metrics import Metrics
from server.rollout import CommitFailed, Deadline
from server.target_rollout import BACK_DEADLINE_S, CanaryFailed, Changes, TargetRollout
from server.targets import Targets
from wire.errors import ArtifactError, EngineError, PacelineError, StaleExpectation, SwapError
from wire.target import TargetManifest
from wire.target_control import ActivateTargetRequest, RollBackTargetRequest, TargetList, TargetSwapReport

logger = logging.getLogger(__name__)

MAX_HISTORY = 64
MAX_REASON = 500
"""Characters of a reason that came with a request."""


@dataclass(slots=True)
class _Result:
    """What a finished change adds to its report."""

    outcome: str = "committed"
    reason: str = ""
    persisted: bool = True
    changes: Changes = field(default_factory=Changes)


class TargetCoordinator:
    """Owner of the active version of the target."""

    def __init__(
        self,
        fleet: Fleet,
        targets: Targets,
        metrics: Metrics,
        lock: asyncio.Lock,
        *,
        deadline_s: float,
        forget_kv: Callable[[Engine], None],
        acceptance_length: Callable[[], float | None],
        on_change: Callable[[int], None],
    ) -> None:
        """`lock` is the draft swaps' too. `acceptance_length` tells the active draft's; `on_change` is told of a new active target."""
        self.targets = targets
        self.history: deque[TargetSwapReport] = deque(maxlen=MAX_HISTORY)
        self._fleet = fleet
        self._metrics = metrics
        self._lock = lock
        self._deadline_s = deadline_s
        self._forget_kv = forget_kv
        self._acceptance_length = acceptance_length
        self._on_change = on_change
        self._changing_to: int | None = None

    async def activate(self, version: int, request: ActivateTargetRequest) -> TargetSwapReport:
        """Make `version` active; raises a PacelineError that says why not."""
        absence = await self.targets.absence(version)  # looked for before anything is held up

        async def work(result: _Result) -> None:
            self._require_active(request.expected_active)
            if absence is not None:
                raise absence
            if version == request.expected_active:
                result.outcome, result.reason = "unchanged", f"target {version} is active already"
                return
            await self._change(version, self._deadline(request.deadline_s), result)
            result.reason = "; ".join(part for part in (request.reason[:MAX_REASON], result.reason) if part)
            self.targets.advance(version)

        return await self._attempt("activate", version, work)

    async def roll_back(self, request: RollBackTargetRequest) -> TargetSwapReport:
        """Go back to the version before."""
        version = self.targets.previous
        if version is None:
            raise SwapError("there is no earlier target to go back to; activate a version instead")

        async def work(result: _Result) -> None:
            self._require_active(request.expected_active)
            await self._change(version, self._deadline(request.deadline_s), result)
            self.targets.retreat(version)

        return await self._attempt("rollback", version, work)

    def may_serve(self, engine: Engine) -> bool:
        """Whether an engine that was just checked computes with the active version and goes on doing so."""
        return self._changing_to is None and self._is_active_on(engine)

    def stop_unless_current(self, engine: Engine) -> None:
        """No requests for an engine with a version that no engine should have now: it came back, perhaps before anybody missed it."""
        if not self._is_active_on(engine) and engine.target_version != self._changing_to:
            engine.mark_down(f"its target is {engine.target_version}, not the active {self.targets.active}")

    def _is_active_on(self, engine: Engine) -> bool:
        return not self.targets.is_managed or engine.target_version == self.targets.active

    async def bring_to_active(self, engine: Engine) -> None:
        """For whoever holds the lock. Raises EngineError where the engine cannot be brought there: it must not serve."""
        active = self.targets.active
        if self.may_serve(engine):
            return
        self.stop_unless_current(engine)
        before = engine.target_version
        assert before is not None, "an engine is brought there after it has told its version"
        try:
            manifest = await self.targets.verify(active)
            await TargetRollout(active, manifest, Deadline(self._deadline_s), forget_kv=self._forget_kv).move(engine)
        except (ArtifactError, CanaryFailed, EngineError) as error:
            if engine.target_version == active:
                # Else it would be taken for one that computes with the active target as it should.
                await TargetRollout(before, None, Deadline(BACK_DEADLINE_S), forget_kv=self._forget_kv).move(engine)
            raise EngineError(f"engine {engine.id} computes with target {before}, not the active {active}: {error}") from error
        logger.info("engine %s brought from target %s to %d", engine.id, before, active)

    async def _attempt(self, trigger: str, version: int, work: Callable[[_Result], Awaitable[None]]) -> TargetSwapReport:
        """Run `work` alone and record how it ended."""
        if self._lock.locked():
            raise SwapInProgress("a swap, or the return of an engine, is under way; retry in a second")
        async with self._lock:
            started_at_s, started = time.time(), time.perf_counter()
            previous, acceptance_length = self.targets.active, self._acceptance_length()
            result, failure = _Result(), None
            try:
                with self._changing(version):
                    await work(result)
            except PacelineError as error:
                failure = error
                result.outcome = "reverted" if isinstance(error, CommitFailed) and error.reverted else "refused"
                result.reason = str(error)
            report = TargetSwapReport(
                version=version,
                previous=previous,
                trigger=trigger,
                outcome=result.outcome,
                reason=result.reason,
                started_at_s=started_at_s,
                duration_ms=(time.perf_counter() - started) * 1000,
                persisted=result.persisted,
                commits=result.changes.commits,
                canary_errors=result.changes.canary_errors,
                acceptance_length=acceptance_length,
            )
        self.history.append(report)
        self._metrics.observe_target_swap(report)
        logger.info("swap to target %d (%s): %s%s", version, trigger, report.outcome, report.reason and f", {report.reason}")
        if failure is not None:
            raise failure
        return report

    @contextmanager
    def _changing(self, version: int) -> Iterator[None]:
        self._changing_to = version
        try:
            yield
        finally:
            self._changing_to = None

    def _require_active(self, expected: int) -> None:
        if self.targets.active != expected:
            raise StaleExpectation(
                f"the active target is {self.targets.active}, the request expects {expected}; read /admin/targets and try again"
            )

    async def listing(self) -> TargetList:
        """Raises ArtifactError where the store cannot be read."""
        return TargetList(
            active_version=self.targets.active,
            previous_version=self.targets.previous,
            targets=await self.targets.listing(),
            swaps=list(self.history),
        )

    async def _change(self, version: int, deadline: Deadline, result: _Result) -> None:
        """Verify, then change every ready engine, then move the pointer."""
        manifest = await self.targets.verify(version)
        engines = self._fleet.ready()
        if not engines:
            raise NoEngineReady(f"target {version} cannot be committed, {self._fleet.why_not_ready()}")
        self._require_base(manifest)
        self._require_no_kv_elsewhere(engines)
        await self.targets.require_pointer()
        rollout = TargetRollout(version, manifest, deadline, forget_kv=self._forget_kv)
        result.changes = rollout.changes
        await rollout.run(engines)
        if problem := await self.targets.persist(version):
            result.persisted = False
            result.reason = f"it serves, but the pointer on disk still names the old target: {problem}"
            logger.error("target %d: %s", version, result.reason)
        self._on_change(version)

    def _require_base(self, manifest: TargetManifest | None) -> None:
        spec = self._fleet.spec()
        if manifest is not None and spec is not None:
            manifest.require_base(spec)

    def _require_no_kv_elsewhere(self, engines: Sequence[Engine]) -> None:
        """Raises SwapError where an engine that is away holds KV for others: it would keep that through the change."""
        holding = [engine.id for engine in self._fleet.engines if engine.leases and engine not in engines]
        if holding:
            raise SwapError(
                f"engines {holding} are not ready and hold KV of target {self.targets.active} that other engines may still pull; "
                "try again when that is over, or when they are back"
            )

    def _deadline(self, seconds: float | None) -> Deadline:
        return Deadline(self._deadline_s if seconds is None else seconds)
