"""The system beside the requests: one sample a second of its metrics, its status and its processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import aiohttp
import msgspec

from loadtest.client import read_at_most
from loadtest.records import Swap, SystemSample
from loadtest.run.clock import Clock
from loadtest.run.gpu_time import GpuTime, busy_shares
from loadtest.run.processor_time import processor_time_s
from loadtest.run.readings import Page, SwapHistory, sample_of
from loadtest.run.target import Target, TargetError
from wire.control import AdminStatus

EVERY_S = 1.0
_TIMEOUT_S = 5.0
_MAX_PAGE_BYTES = 32 << 20


class Sampler:
    """A second in which the system's metrics do not answer has no sample: nothing is known of it."""

    def __init__(
        self, session: aiohttp.ClientSession, target: Target, clock: Clock, keep: Callable[[SystemSample], None]
    ) -> None:
        self._session = session
        self._target = target
        self._clock = clock
        self._keep = keep
        self._history = SwapHistory(clock.started_at_s)
        self._gpu_time = GpuTime(busy_shares)
        self._swaps: list[Swap] = []
        """Seen, but in no sample yet."""

    async def run(self) -> None:
        """Until cancelled."""
        next_at_s = 0.0
        while True:
            await self._clock.until(next_at_s)
            await self.sample()
            next_at_s = max(next_at_s + EVERY_S, self._clock.now_s())

    async def sample(self) -> None:
        """Take one sample now."""
        at_s = self._clock.now_s()
        text, status = await asyncio.gather(self._metrics(), self._status())
        if status is not None:
            self._swaps += self._history.new(status)
        if text is None:
            return
        # Beside the event loop: reading a long page would hold up requests that are due.
        self._keep(await asyncio.to_thread(self._read, text, status, at_s))
        self._swaps = []

    def _read(self, text: str, status: AdminStatus | None, at_s: float) -> SystemSample:
        pids = self._target.process_ids()
        return sample_of(
            Page(text),
            status,
            at_s=at_s,
            cpu_s=processor_time_s(pids),
            # Of another machine's system this one's GPUs say nothing.
            gpu_s=self._gpu_time.until(at_s) if pids else {},
            swaps=self._swaps,
        )

    async def _metrics(self) -> str | None:
        try:
            timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
            async with self._session.get(f"{self._target.url}/metrics", timeout=timeout) as response:
                page = await read_at_most(response.content, _MAX_PAGE_BYTES + 1)
                return page.decode() if response.status == 200 and len(page) <= _MAX_PAGE_BYTES else None
        except (aiohttp.ClientError, TimeoutError, OSError, UnicodeDecodeError):
            return None

    async def _status(self) -> AdminStatus | None:
        if self._target.admin is None:
            return None
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return msgspec.convert(await self._target.admin.call("GET", "/admin/status"), AdminStatus)
        except (TargetError, TimeoutError, msgspec.ValidationError):
            return None
