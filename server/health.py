"""HealthMonitor: finds out which engines may serve, and brings those that come (back) up into line.

Two tasks per engine. One probes every second, and at once where a request met a dead connection. The other asks the core,
more slowly, because the engine's HTTP server says it is well while its core hangs. This module moves engines in and out of
the fleet; which draft is the active one is the swap coordinator's knowledge.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress

from server.config import GatewaySettings
from server.fleet import Engine, Fleet, common_parts
from server.swap import SwapCoordinator
from wire.control import EngineStatus
from wire.errors import EngineError, PacelineError, SchemaMismatch, WireError
from wire.spec import SCHEMA_VERSION

logger = logging.getLogger(__name__)

REQUIRED_PARTS = ("capture", "weights")
MAX_SILENT_PROBES = 3
"""A busy engine may miss one probe; a dead one refuses the connection, which counts at once."""
MAX_SILENT_CORE_PROBES = 2
"""Of an engine that answers clients. Nobody has to wait for a prefill engine, so one silent probe is enough there."""
CORE_SILENT = "the engine core does not answer"
RESYNC_S = 30.0
"""Between attempts to bring an engine to the active draft when it could not be brought there."""


class PartsMissing(WireError):
    """An engine runs without our worker parts."""

    code = "parts_missing"


class HealthMonitor:
    """Keeps `Engine.ready` true to life."""

    def __init__(
        self, fleet: Fleet, swap: SwapCoordinator, settings: GatewaySettings, *, on_change: Callable[[Engine, bool], None]
    ) -> None:
        self.capture_rate: float | None = None
        """The operator's last wish; applied to every engine that comes up."""
        self._fleet = fleet
        self._swap = swap
        self._settings = settings
        self._on_change = on_change
        """Told when another process or another target answers under an engine's id, and whether it is another process."""
        self._hung: set[Engine] = set()
        """Engines whose core does not answer."""

    async def watch(self, engine: Engine) -> None:
        """Probe one engine for as long as the gateway runs."""
        num_silent = 0
        next_resync_s = 0.0
        while True:
            engine.wake.clear()
            try:
                await engine.client.health(timeout_s=self._settings.health_timeout_s)
                num_silent = 0
            except EngineError as error:
                num_silent += 1
                if _is_timeout(error) and num_silent >= MAX_SILENT_PROBES:
                    self._give_up(engine, str(error), error.__cause__)
                elif not engine.ready or not _is_timeout(error):
                    self._mark_down(engine, str(error), error.__cause__)
            else:
                is_odd = engine.ready and bool(engine.reason) and time.monotonic() >= next_resync_s
                if engine in self._hung:
                    # A synchronisation would wait for the core, and these probes with it.
                    self._give_up(engine, CORE_SILENT)
                elif engine.needs_sync or is_odd:
                    next_resync_s = time.monotonic() + RESYNC_S
                    await self._sync(engine)
            await _pause(engine.wake, self._settings.health_interval_s)

    async def watch_core(self, engine: Engine) -> None:
        """Ask one engine's core for as long as the gateway runs, and have it synchronised when it is not what it was."""
        num_silent = 0
        max_silent = MAX_SILENT_CORE_PROBES if engine.can_decode else 1
        while True:
            await _pause(engine.wake_core, self._settings.core_interval_s)
            engine.wake_core.clear()
            status, is_silent = await self._ask_core(engine)
            # A core that loads a target answers nothing meanwhile; how long that may take is for the change to say.
            num_silent = num_silent + 1 if is_silent and not engine.is_changing else 0
            if status is not None and not engine.wake_core.is_set():
                engine.is_overdue = False
            if status is not None and engine.ready and not engine.is_same(status):
                engine.request_sync()
            if num_silent >= max_silent:
                self._hung.add(engine)
                self._give_up(engine, CORE_SILENT)
            elif engine in self._hung and not num_silent:
                self._hung.remove(engine)
                engine.wake.set()

    async def set_capture_rate(self, rate: float) -> dict[str, str]:
        """Remember and apply the rate; returns the engines' errors by id."""
        self.capture_rate = rate
        problems: dict[str, str] = {}
        for engine in self._fleet.ready():
            try:
                await engine.client.set_capture(rate)
            except EngineError as error:
                problems[engine.id] = str(error)
                engine.request_sync()
        return problems

    async def _sync(self, engine: Engine) -> None:
        """Verify an engine and bring it into line; it serves afterwards, or its reason says why not."""
        try:
            status = await engine.client.status()
            self._check(engine, status)
            is_another = engine.status is not None and not engine.is_same(status)
            is_restarted = engine.epoch != status.engine_epoch
            engine.adopt(status)
            if is_another:
                self._on_change(engine, is_restarted)
            if self.capture_rate is not None:
                await engine.client.set_capture(self.capture_rate)
            await self._swap.align(engine)
        except PacelineError as error:
            self._mark_down(engine, str(error), error.__cause__)
            return
        if engine in self._hung:
            self._give_up(engine, CORE_SILENT)
            return
        logger.info(
            "engine %s is ready with draft %s%s", engine.id, engine.draft_version, engine.reason and f"; it {engine.reason}"
        )

    async def _ask_core(self, engine: Engine) -> tuple[EngineStatus | None, bool]:
        """The answer, if it is one, and whether there was silence: a dead connection is the other probe's finding."""
        try:
            return await engine.client.status(timeout_s=self._settings.core_timeout_s), False
        except EngineError as error:
            return None, _is_timeout(error)

    def _check(self, engine: Engine, status: EngineStatus) -> None:
        """Raises a WireError that says why this engine may not serve."""
        if status.schema_version != SCHEMA_VERSION:
            raise SchemaMismatch(
                f"it speaks schema {status.schema_version}, the gateway {SCHEMA_VERSION}; run the same release everywhere"
            )
        if status.engine_id != engine.id:
            raise WireError(f"it calls itself {status.engine_id!r}; check the engine's URL in the configuration")
        missing = [part for part in REQUIRED_PARTS if part not in common_parts(status)]
        if missing:
            raise PartsMissing(f"not every worker has loaded {missing}; check --worker-cls and the engine's log")
        if len({worker.draft_version for worker in status.workers}) > 1:
            raise WireError("its workers hold different draft versions; restart it")
        if len({worker.target_version for worker in status.workers}) > 1:
            raise WireError("its workers compute with different targets; restart it")
        for other in self._fleet.ready():
            if other is not engine and other.status is not None:
                other.status.spec.require(status.spec, who=f"engine {engine.id}")

    def _give_up(self, engine: Engine, reason: str, cause: BaseException | None = None) -> None:
        """It hangs. What waits for it goes elsewhere; where there is no other engine it may as well go on waiting."""
        self._mark_down(engine, reason, cause)
        if not self._fleet.why_not_ready():
            engine.lose()

    def _mark_down(self, engine: Engine, reason: str, cause: BaseException | None = None) -> None:
        """The cause may name the engine's address, so it goes to the log and not into the reason, which clients see."""
        if engine.ready or engine.reason != reason:
            logger.warning(
                "engine %s (%s) is not ready: %s%s", engine.id, engine.client.base_url, reason, f" ({cause!r})" * bool(cause)
            )
        if engine.ready:
            engine.breaker.fail()
        engine.mark_down(reason)


async def _pause(wake: asyncio.Event, interval_s: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(interval_s):
            await wake.wait()


def _is_timeout(error: EngineError) -> bool:
    return isinstance(error.__cause__, TimeoutError)
