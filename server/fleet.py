"""Fleet: the engines, what is known of each, and which one a request goes to.

This module holds state; `health` finds it out and `swap` changes drafts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import msgspec

from server.admission import RETRY_AFTER_S
from server.config import KV_LEASE_S, PoolKind
from server.engines import EngineClient
from server.relay.breaker import Breaker, Visit
from wire.control import EngineStatus, EngineView
from wire.spec import CaptureSpec

if TYPE_CHECKING:
    from server.relay.prefill import Lease

Result = TypeVar("Result")

START_RETRY_AFTER_S = 10
"""Told to clients where none can be served before an engine has started, which takes from ten seconds to minutes."""


class EngineLost(ConnectionError):
    """The engine was given up while it had a request."""


class Engine:
    """One engine replica."""

    def __init__(self, client: EngineClient, events_endpoint: str, kind: PoolKind = "combined") -> None:
        self.client = client
        self.events_endpoint = events_endpoint
        self.kind = kind
        self.is_draining = False
        """It ends what it has and gets nothing new; over with the process, the gateway's or its own."""
        self.ready = False
        """It answers, its parts are verified, and requests may go to it."""
        self.reason = "not probed yet"
        self.status: EngineStatus | None = None
        """As of the last synchronisation."""
        self.needs_sync = True
        self.draft_version: int | None = None
        self.target_version: int | None = None
        self.num_in_flight = 0
        self.breaker = Breaker()
        self.last_lease_s: float | None = None
        """When it last held KV for another engine, on the monotonic clock."""
        self.leases: set[Lease] = set()
        """KV it holds for decode legs that run or wait; while they wait, their engines keep it from running out."""
        self.is_lost = False
        """It hangs: what it has in hand is not waited for."""
        self._waiting: set[Callable[[], None]] = set()
        """What to call when that happens."""
        self.is_changing = False
        """Its target is about to change: it gets no prefill legs, whose KV would outlive the target."""
        self.is_overdue = False
        """A prefill leg on it ran out of time, and its core has answered no probe since: it gets no further ones."""
        self.wake = asyncio.Event()
        """Set to have the next health probe now."""
        self.wake_core = asyncio.Event()
        """Set to have the next probe of its core now."""

    @property
    def id(self) -> str:
        return self.client.id

    @property
    def can_decode(self) -> bool:
        return self.kind != "prefill"

    @property
    def takes_requests(self) -> bool:
        return self.ready and not self.is_draining and self.breaker.allows

    @property
    def can_answer(self) -> bool:
        """A client's request may go to it; to a prefill engine only the first leg may."""
        return self.takes_requests and self.can_decode

    @property
    def takes_prefills(self) -> bool:
        """A prefill leg may go to it."""
        return self.takes_requests and not self.is_overdue and not self.is_changing

    @property
    def why_not(self) -> str:
        """Why it answers no clients, or what is odd about it, to be read after its id; empty when all is well."""
        if why := self.reason.removeprefix(f"engine {self.id} ") or self.breaker.reason:
            return why
        if self.is_draining:
            return "is draining"
        return "" if self.can_decode else "a prefill engine answers no client itself"

    @property
    def lease_left_s(self) -> float:
        """Until no other engine can want blocks of this one; at least that long."""
        if self.leases:
            return KV_LEASE_S
        return 0.0 if self.last_lease_s is None else max(self.last_lease_s + KV_LEASE_S - time.monotonic(), 0.0)

    @property
    def is_drained(self) -> bool:
        """It can be stopped and nobody notices."""
        return self.is_draining and self.num_in_flight == 0 and self.lease_left_s == 0.0

    @property
    def epoch(self) -> str:
        return self.status.engine_epoch if self.status else ""

    def is_same(self, status: EngineStatus) -> bool:
        """Whether the process and the target are those of the last synchronisation, so that what its cache held, it holds."""
        known = self.status
        if known is None:
            return False
        targets = [{worker.target_version for worker in one.workers} for one in (known, status)]
        return status.engine_epoch == known.engine_epoch and targets[0] == targets[1]

    def adopt(self, status: EngineStatus) -> None:
        """Remember what the engine says of itself."""
        if status.engine_epoch != self.epoch:
            # Met for the first time, it may hold KV of requests that another gateway process had.
            is_holding = not self.epoch and self.kind == "prefill"
            self.breaker.reset()
            self.leases.clear()
            # Whoever drained it before the gateway had met it meant the process that runs.
            self.is_draining = self.is_draining and not self.epoch
            self.last_lease_s = time.monotonic() if is_holding else None
        self.status = status
        self.draft_version = status.workers[0].draft_version
        self.target_version = status.workers[0].target_version

    def note_depths(self, depths: list[int]) -> None:
        """K by batch size, as the engine has it now."""
        if self.status is not None and depths:
            self.status = msgspec.structs.replace(self.status, depth=depths[0], depths=depths)

    def note_target(self, version: int) -> None:
        """It has changed its target, as it was asked to."""
        self.target_version = version
        if self.status is not None:
            workers = [msgspec.structs.replace(worker, target_version=version) for worker in self.status.workers]
            self.status = msgspec.structs.replace(self.status, workers=workers)

    def mark_ready(self, remark: str = "") -> None:
        self.ready, self.reason, self.needs_sync = True, remark, False
        self.is_lost = self.is_overdue = False

    def mark_down(self, reason: str) -> None:
        """No more requests until a probe says otherwise; what it holds is unknown then."""
        self.ready, self.reason, self.needs_sync = False, reason, True

    def suspect(self, reason: str, visit: Visit | None = None) -> None:
        """A request met a dead connection: stop sending and probe now."""
        self.breaker.fail(visit)
        self.mark_down(reason)
        self.wake.set()

    def doubt(self, visit: Visit) -> None:
        """One stream broke; the engine may be well, so it goes on serving until the probe this asks for."""
        self.breaker.fail(visit)
        self.wake.set()

    def miss(self) -> None:
        """A prefill leg ran out of time: it may be busy or hang, which its core is asked now."""
        self.is_overdue = True
        self.wake.set()
        self.wake_core.set()

    def lose(self) -> None:
        """It hangs, and others are there: all who wait for it are told, and go there."""
        self.is_lost = True
        waiting, self._waiting = self._waiting, set()
        for tell in waiting:
            tell()

    @contextmanager
    def told_when_lost(self, tell: Callable[[], None]) -> Iterator[None]:
        """Call `tell` once when the engine is lost, at once if it is."""
        if self.is_lost:
            tell()
        else:
            self._waiting.add(tell)
        try:
            yield
        finally:
            self._waiting.discard(tell)

    async def unless_lost(self, work: Awaitable[Result]) -> Result:
        """Wait for what this engine does; raises EngineLost."""
        try:
            async with asyncio.timeout(None) as scope:
                with self.told_when_lost(lambda: scope.reschedule(asyncio.get_running_loop().time())):
                    return await work
        except TimeoutError as error:
            if scope.expired():
                raise EngineLost from error
            raise

    def request_sync(self) -> None:
        """What the engine serves may have changed; it goes on serving meanwhile."""
        self.needs_sync = True
        self.wake.set()

    @contextmanager
    def request(self) -> Iterator[Visit]:
        """Count one request in flight."""
        self.num_in_flight += 1
        visit = self.breaker.begin()
        try:
            yield visit
        finally:
            self.breaker.end(visit)
            self.num_in_flight -= 1

    def view(self) -> EngineView:
        status = self.status
        return EngineView(
            id=self.id,
            ready=self.ready,
            reason=self.reason or self.breaker.reason,
            engine_epoch=self.epoch,
            draft_version=self.draft_version,
            target_version=self.target_version,
            parts=common_parts(status) if status else [],
            num_speculative_tokens=status.num_speculative_tokens if status else 0,
            depth=status.depth if status else 0,
            num_in_flight=self.num_in_flight,
            kind=self.kind,
            is_draining=self.is_draining,
        )


class Fleet:
    """All engines of this gateway."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = list(engines)

    def ready(self) -> list[Engine]:
        return [engine for engine in self.engines if engine.ready]

    def find(self, engine_id: str) -> Engine | None:
        return next((engine for engine in self.engines if engine.id == engine_id), None)

    def choose(self, exclude: Collection[Engine] = ()) -> Engine | None:
        """Where the next request goes: the ready engine with the fewest requests in flight."""
        candidates = [engine for engine in self.engines if engine.can_answer and engine not in exclude]
        return min(candidates, key=lambda engine: engine.num_in_flight, default=None)

    def spec(self) -> CaptureSpec | None:
        """What the ready engines capture; they agree, or they would not all be ready."""
        return next((engine.status.spec for engine in self.engines if engine.ready and engine.status), None)

    def why_not_ready(self) -> str:
        """Empty when at least one engine can answer requests."""
        if any(engine.can_answer for engine in self.engines):
            return ""
        return "no engine is ready: " + "; ".join(f"{engine.id}: {engine.why_not}" for engine in self.engines)

    def retry_after_s(self, lost: Collection[Engine] = ()) -> int:
        """When to try again. An engine that is merely kept from requests by its breaker may be let have some in a second.

        Those in `lost` have just failed somebody and may look ready still.
        """
        able = (engine for engine in self.engines if engine not in lost)
        is_soon = any(engine.ready and engine.can_decode and not engine.is_draining for engine in able)
        return RETRY_AFTER_S if is_soon else START_RETRY_AFTER_S


def common_parts(status: EngineStatus) -> list[str]:
    """Parts that every worker of an engine has loaded."""
    return sorted(set.intersection(*(set(worker.parts) for worker in status.workers))) if status.workers else []
