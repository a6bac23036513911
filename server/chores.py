"""Chores: what the gateway does beside answering, each for as long as it runs.

A chore that fails is a fault of ours. It is logged with its traceback, counted, and begun anew after a pause: everything it knows is
kept outside it, and the gateway's other work, streams above all, goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

from server.metrics import Metrics

logger = logging.getLogger(__name__)

PAUSE_S = 1.0
"""Before a chore that failed is begun anew."""

Chore = Callable[[], Awaitable[None]]


class Chores:
    """Runs chores by name, and tells which have failed."""

    def __init__(self, metrics: Metrics, *, pause_s: float = PAUSE_S) -> None:
        self.num_faults: Counter[str] = Counter()
        """By name."""
        self._metrics = metrics
        self._pause_s = pause_s

    @asynccontextmanager
    async def running(self, chores: Mapping[str, Chore]) -> AsyncIterator[None]:
        """Run them beside the body."""
        tasks = [asyncio.ensure_future(self._keep(name, chore)) for name, chore in chores.items()]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def try_once(self, name: str, chore: Chore) -> bool:
        """Run a chore, or one round of it, to its end; False where it failed."""
        try:
            await chore()
        except Exception:
            logger.exception("the gateway's chore %r failed", name)
            self.num_faults[name] += 1
            self._metrics.chore_faults.labels(name).inc()
            return False
        return True

    async def _keep(self, name: str, chore: Chore) -> None:
        while not await self.try_once(name, chore):
            await asyncio.sleep(self._pause_s)
