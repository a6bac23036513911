"""The one clock of a run."""

from __future__ import annotations

import asyncio
import time


class Clock:
    """Seconds since the run's start, by the monotonic clock."""

    def __init__(self) -> None:
        self._monotonic_s = time.monotonic()
        self.started_at_s = time.time()
        """Wall clock."""

    def now_s(self) -> float:
        return time.monotonic() - self._monotonic_s

    def of_monotonic(self, at_s: float) -> float:
        """A reading of the monotonic clock, on this one."""
        return at_s - self._monotonic_s

    async def until(self, at_s: float) -> None:
        """Wait; gives way to others once even where that time is past."""
        await asyncio.sleep(0)
        # Event loops round to milliseconds and may wake a little early.
        while (left_s := at_s - self.now_s()) > 0:
            await asyncio.sleep(left_s)
