"""Places in the engines: which rollouts hold one, by the concurrency and priority controllers.

A rollout asks for a seat with each turn and gives it back while its environment works. One that is preempted loses its stream, keeps
its tokens and asks again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from rl.controllers import concurrency, priority
from rl.controllers.concurrency import Concurrency, ConcurrencyDecision, ConcurrencyLimits, ConcurrencyReading
from rl.controllers.priority import Priority, PriorityDecision, PriorityReading


class Preempted(Exception):
    """Somebody else needs the seat."""


@dataclass(eq=False, slots=True)
class _Request:
    """One rollout that wants a seat or has one."""

    granted: asyncio.Event = field(default_factory=asyncio.Event)
    stop: asyncio.Timeout | None = None
    """Set while it holds the seat; at its deadline the seat is taken away."""
    is_taken_away: bool = False
    number: int = 0
    """Counts seats as they are granted: the highest is the youngest."""


class Seats:
    """`on_change` is called whenever somebody asks for a seat or gives one back: then `fill`."""

    def __init__(self, limits: ConcurrencyLimits, on_change: Callable[[], None]) -> None:
        self._limits = limits
        self._on_change = on_change
        self._concurrency = Concurrency(cap=limits.least)
        self._priority = Priority()
        self._requests: dict[str, _Request] = {}
        self._priorities: dict[str, int] = {}
        self._num_granted = 0
        self.num_preempted = 0
        self.held_s = 0.0
        """Seconds of all seats that were given back."""

    @property
    def cap(self) -> int:
        return self._concurrency.cap

    @property
    def wanted(self) -> dict[str, bool]:
        """Whether each rollout that needs a seat has it."""
        return {rollout_id: request.granted.is_set() for rollout_id, request in self._requests.items()}

    @asynccontextmanager
    async def seat(self, rollout_id: str) -> AsyncIterator[int]:
        """Wait for a seat and hold it; gives vLLM's priority. Raises Preempted where it is taken away meanwhile."""
        request = self._requests[rollout_id] = _Request()
        loop = asyncio.get_running_loop()
        self._on_change()
        try:
            await request.granted.wait()
            granted_s = loop.time()
            try:
                async with asyncio.timeout(None) as request.stop:
                    yield self._priorities.get(rollout_id, priority.LAST)
            finally:
                self.held_s += loop.time() - granted_s
        except TimeoutError as error:
            if request.stop is None or not request.stop.expired():
                raise
            raise Preempted from error
        finally:
            del self._requests[rollout_id]
            self._on_change()

    def observe(self, reading: ConcurrencyReading) -> ConcurrencyDecision:
        """One poll of the engines' metrics: another cap, and the youngest rollouts taken back where KV runs out."""
        self._concurrency, decision = concurrency.decide(self._limits, self._concurrency, reading)
        held = [(request.number, name) for name, request in self._requests.items() if request.granted.is_set()]
        self._take_away(name for _, name in sorted(held, reverse=True)[: decision.num_taken_back])
        self._on_change()
        return decision

    @property
    def num_free(self) -> int:
        return max(self.cap - sum(self.wanted.values()), 0)

    def fill(self, reading: PriorityReading) -> None:
        """Give free seats to those worth most; the reading's rollouts are those of `wanted`."""
        _, decision = priority.decide(self._priority, reading)
        self._grant(decision)

    def allot(self, reading: PriorityReading) -> PriorityDecision:
        """One round of the priority controller: seats are filled, and taken from some, to be given to others once they are free."""
        self._priority, decision = priority.decide(self._priority, reading)
        self._take_away(decision.preempt)
        self._grant(decision)
        return decision

    def _grant(self, decision: PriorityDecision) -> None:
        self._priorities = dict(decision.priorities)
        for rollout_id in decision.start[: self.num_free]:
            request = self._requests[rollout_id]
            self._num_granted += 1
            request.number = self._num_granted
            request.granted.set()

    def _take_away(self, rollout_ids: Iterable[str]) -> None:
        now_s = asyncio.get_running_loop().time()
        for rollout_id in rollout_ids:
            request = self._requests[rollout_id]
            if request.stop is not None and not request.is_taken_away:
                request.is_taken_away = True
                request.stop.reschedule(now_s)
                self.num_preempted += 1
