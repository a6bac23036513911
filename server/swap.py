"""SwapCoordinator: which draft is active, who may change it, and how to get back.

One swap at a time, compare-and-swap on the active version, all engines or none. The active version lives here and in the
engines; the pointer on disk follows and may fail without harm.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

from server.canary import Canary
from server.drafts import Drafts
from server.errors import NoEngineReady, SwapInProgress
from server.fleet import Engine, Fleet
from server.floor import FloorChange, FloorWatch
from server.metrics import Metrics
from server.rollout import CommitFailed, Deadline, commit_on_all, move, stage_on_all
from server.target_swap import TargetCoordinator
from wire.artifact import DraftManifest
from wire.control import ActivateRequest, CalibrationView, CommitReport, EngineStatus, SwapReport
from wire.errors import ArtifactError, EngineError, PacelineError, StaleExpectation, SwapError

logger = logging.getLogger(__name__)

MAX_HISTORY = 64
MAX_REASON = 500
"""Characters of a reason that came with a request."""
MAX_ROLL_BACKS_IN_A_ROW = 2
"""After that many canaries in a row the learner is not to be trusted: back to the floor."""


@dataclass(slots=True)
class _Result:
    """What a finished swap adds to its report."""

    previous: int | None
    reason: str = ""
    outcome: str = "committed"
    persisted: bool = True
    commits: dict[str, CommitReport] = field(default_factory=dict)


class SwapCoordinator:
    """Owner of the active version."""

    def __init__(
        self,
        fleet: Fleet,
        drafts: Drafts,
        canary: Canary,
        floor_watch: FloorWatch,
        metrics: Metrics,
        *,
        deadline_s: float,
        calibration: Callable[[], CalibrationView],
        target: TargetCoordinator,
        lock: asyncio.Lock,
    ) -> None:
        """`lock` is the target's coordinator's too: one change at a time, of whichever model."""
        self.drafts = drafts
        self.history: deque[SwapReport] = deque(maxlen=MAX_HISTORY)
        self.num_roll_backs_in_a_row = 0
        self._fleet = fleet
        self._canary = canary
        self._floor_watch = floor_watch
        self._metrics = metrics
        self._deadline_s = deadline_s
        self._calibration = calibration
        self._target = target
        self._lock = lock
        self._rollout: dict[Engine, EngineStatus] | None = None
        """The engines that the swap under way moves, as they were when it began, until it is settled; None where there is none."""

    @property
    def is_busy(self) -> bool:
        return self._lock.locked()

    async def activate(self, version: int, request: ActivateRequest) -> SwapReport:
        """Make `version` active; raises a PacelineError that says why not."""
        absence = await self.drafts.absence(version)  # looked for before anything is held up

        async def work() -> _Result:
            previous = self._require_active(request.expected_active)
            if absence is not None:
                raise absence
            if version == previous:
                return _Result(previous, f"draft {version} is active already", outcome="unchanged")
            manifest = await self.drafts.verify(version)
            if not request.force:
                self.drafts.require_accepted(manifest)
            result = await self._commit(version, manifest)
            result.reason = "; ".join(part for part in (request.reason[:MAX_REASON], result.reason) if part)
            trusted = self._canary.trusted_version
            self.drafts.advance(version)
            self._canary.begin(version, previous if trusted is None else trusted)
            return result

        return await self._attempt("activate", version, work, forced=request.force)

    async def roll_back(self, expected_active: int | None = None) -> SwapReport:
        """Go back to the previous draft, or to the floor where there is none; an operator's wish."""
        targets = [self.drafts.previous, await self.drafts.find_floor()]

        async def work(version: int) -> _Result:
            if expected_active is not None:
                self._require_active(expected_active)
            result = await self._commit(version, await self.drafts.verify(version))
            self._canary.supersede(f"rolled back to draft {version} by the operator")
            self.drafts.retreat(version)
            return result

        return await self._first_possible("rollback", targets, work)

    async def check_canary(self) -> None:
        """Act on the canary's verdict, if there is one."""
        verdict = None if self.is_busy else self._canary.evaluate()
        if verdict is None:
            return
        if verdict.outcome == "pass":
            self.num_roll_backs_in_a_row = 0
            self._finish_canary("passed", verdict.reason)
        elif verdict.outcome == "roll_back":
            try:
                await self._roll_back_canary(verdict.reason)
            except PacelineError as error:
                logger.error("the canary's roll back failed: %s", error)
                self._canary.postpone(f"{verdict.reason}; rolling back failed: {error}")

    async def check_floor(self) -> None:
        """Let what the floor watch wants serve, if it wants another draft."""
        change = None if self.is_busy else self._floor_watch.evaluate()
        if change is None or self._canary.trusted_version == self.drafts.floor:  # then the canary compares the same two
            return
        try:
            await self._first_possible("floor", [change.version], partial(self._make_change, change))
        except PacelineError as error:
            logger.error("the floor watch's change failed: %s", error)
            self._floor_watch.postpone(f"{change.reason}; draft {change.version} could not be activated: {error}")

    async def align(self, engine: Engine) -> None:
        """Bring an engine that was just checked to the active version and let it serve.

        Where it cannot be brought to the draft it serves all the same: that changes speed, never output. Raises EngineError where
        it does not answer, is not the one that was checked any more, or cannot be brought to the active target.
        """
        self._target.stop_unless_current(engine)
        may_serve = self._target.may_serve(engine)
        if may_serve and self._rollout is None and engine.draft_version == self.drafts.active:
            engine.mark_ready()
            return
        if may_serve and self._rollout is not None and engine in self._rollout and engine.is_same(self._rollout[engine]):
            # The swap brings it into line. What it told may be older than its commit, so it is asked again.
            engine.mark_ready()
            engine.needs_sync = True
            return
        async with self._lock:
            status = await engine.client.status()
            if not engine.is_same(status):
                raise EngineError(f"engine {engine.id} has restarted since it was checked, or changed its target")
            engine.adopt(status)
            await self._target.bring_to_active(engine)
            engine.mark_ready(await self._bring_to_active(engine))

    async def _roll_back_canary(self, reason: str) -> None:
        bad = self.drafts.active
        assert bad is not None, "a watched draft is active"
        go_to_floor = self.num_roll_backs_in_a_row + 1 >= MAX_ROLL_BACKS_IN_A_ROW
        targets = [self._canary.trusted_version, await self.drafts.find_floor()]

        async def work(version: int) -> _Result:
            self._require_active(bad)
            result = await self._commit(version, await self.drafts.verify(version))
            self.drafts.retreat(version)
            self.drafts.mark_rolled_back(bad, reason)
            self.num_roll_backs_in_a_row += 1
            self._finish_canary("rolled_back", reason)
            result.reason = f"draft {bad}: {reason}" + (f"; {result.reason}" if result.reason else "")
            return result

        await self._first_possible("canary", targets[::-1] if go_to_floor else targets, work)

    async def _make_change(self, change: FloorChange, version: int) -> _Result:
        """The draft that is left is not marked: traffic that suits it may return."""
        self._require_active(change.leaves)
        result = await self._commit(version, await self.drafts.verify(version))
        self._canary.supersede(f"draft {version} serves instead, by the floor watch")
        if version == self.drafts.floor:
            self.drafts.retreat(version)
        else:
            self.drafts.advance(version)
        self._floor_watch.note(change)
        result.reason = f"draft {change.leaves}: {change.reason}" + (f"; {result.reason}" if result.reason else "")
        return result

    async def _first_possible(
        self, trigger: str, targets: list[int | None], work: Callable[[int], Awaitable[_Result]]
    ) -> SwapReport:
        """Try targets in order, the next one where an artifact is unusable."""
        candidates = [target for target in dict.fromkeys(targets) if target is not None and target != self.drafts.active]
        error: PacelineError = SwapError(self._why_nowhere_to_go())
        for target in candidates:
            try:
                return await self._attempt(trigger, target, partial(work, target), forced=True)
            except ArtifactError as unusable:
                error = unusable
        raise error

    def _why_nowhere_to_go(self) -> str:
        active = self.drafts.active
        if active is not None and active == self.drafts.floor:
            return f"draft {active} is active and is the floor itself; there is nothing earlier to go back to"
        return "there is no earlier draft and no floor to go back to; activate a version instead"

    async def _attempt(self, trigger: str, version: int, work: Callable[[], Awaitable[_Result]], *, forced: bool) -> SwapReport:
        """Run `work` alone and record how it ended."""
        if self.is_busy:
            raise SwapInProgress("another swap, or the return of an engine, is under way; retry in a second")
        async with self._lock:
            started_at_s, started = time.time(), time.perf_counter()
            previous = self.drafts.active
            failure: PacelineError | None = None
            try:
                result = await work()
            except PacelineError as error:
                failure = error
                reverted = isinstance(error, CommitFailed) and bool(error.reverted)
                result = _Result(previous, str(error), outcome="reverted" if reverted else "refused")
            finally:
                self._rollout = None
            calibration = self._calibration()
            report = SwapReport(
                version=version,
                previous=result.previous,
                trigger=trigger,
                outcome=result.outcome,
                reason=result.reason,
                forced=forced,
                started_at_s=started_at_s,
                duration_ms=(time.perf_counter() - started) * 1000,
                persisted=result.persisted,
                commits=result.commits,
                served=next((pair for pair in calibration.pairs if pair.version == result.previous), None),
                correlation=calibration.correlation,
            )
        self.history.append(report)
        self._metrics.observe_swap(report)
        logger.info("swap to draft %d (%s): %s%s", version, trigger, report.outcome, report.reason and f", {report.reason}")
        if failure is not None:
            raise failure
        return report

    async def _commit(self, version: int, manifest: DraftManifest) -> _Result:
        """Stage and commit on every ready engine, then move the pointer."""
        engines = self._fleet.ready()
        spec = self._fleet.spec()
        if not engines or spec is None:
            raise NoEngineReady(f"draft {version} cannot be committed, {self._fleet.why_not_ready()}")
        spec.require(manifest.spec, who=f"draft {version}")
        deadline = Deadline(self._deadline_s)
        self._rollout = {engine: engine.status for engine in engines if engine.status is not None}
        await stage_on_all(engines, version, deadline)
        result = _Result(self.drafts.active, commits=await commit_on_all(engines, version, deadline))
        if problem := await self.drafts.persist_active(version):
            result.persisted = False
            result.reason = f"it serves, but the pointer on disk still names the old draft: {problem}"
            logger.error("draft %d %s", version, result.reason)
        return result

    async def _bring_to_active(self, engine: Engine) -> str:
        """A remark for the engine's reason; empty when it serves the active version."""
        if self.drafts.active is None:
            self.drafts.active = engine.draft_version
        active = self.drafts.active
        if active is None or engine.draft_version == active:
            return ""
        try:
            report = await move(engine, active, timeout_s=self._deadline_s)
        except EngineError as error:
            return f"serves draft {engine.draft_version}, not the active {active}: {error}"
        logger.info("engine %s brought from draft %d to %d", engine.id, report.previous, active)
        return ""

    def _require_active(self, expected: int) -> int:
        if self.drafts.active != expected:
            raise StaleExpectation(
                f"the active draft is {self.drafts.active}, the request expects {expected}; read /admin/status and try again"
            )
        return expected

    def _finish_canary(self, state: str, reason: str) -> None:
        self._canary.finish(state, reason)
        self._metrics.canary_verdicts.labels(state).inc()
