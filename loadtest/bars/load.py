"""Load beside a measurement: requests that keep coming until the measurement is over, with every result kept."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from loadtest.client import StreamResult
from loadtest.closed_loop import keep_busy
from loadtest.system import System
from loadtest.traffic import Prompt

_REASON_CHARACTERS = 120
_NUM_REASONS = 5


@dataclass
class Load:
    """What came back so far."""

    results: list[StreamResult] = field(default_factory=list)

    @property
    def failed(self) -> list[StreamResult]:
        return [result for result in self.results if not result.is_ok]

    @property
    def num_ok(self) -> int:
        return len(self.results) - len(self.failed)

    def reasons(self) -> list[str]:
        return reasons(self.failed)


def reasons(failed: Iterable[StreamResult]) -> list[str]:
    """Distinct reasons of failures, a few, without what differs from request to request at their end."""
    texts = dict.fromkeys(
        (one.error or ("truncated" if one.is_truncated else "incomplete"))[:_REASON_CHARACTERS] for one in failed
    )
    return list(texts)[:_NUM_REASONS]


@asynccontextmanager
async def background_load(
    system: System,
    prompts: Sequence[Prompt],
    *,
    concurrency: int,
    options: Callable[[int], Mapping[str, Any]] | None = None,
    headers: Mapping[str, str] | None = None,
) -> AsyncIterator[Load]:
    """Keep `concurrency` requests in flight while the block runs; those in flight at its end are finished."""
    load = Load()
    is_over = False
    task = asyncio.create_task(
        keep_busy(
            system.url,
            system.model,
            prompts,
            concurrency=concurrency,
            should_stop=lambda: is_over,
            on_result=load.results.append,
            options=options,
            headers=headers,
        )
    )
    try:
        yield load
    except BaseException:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise
    is_over = True
    await task


def progress(text: str) -> None:
    """Tell the person who waits; standard output is for results."""
    print(f"  {text}", file=sys.stderr, flush=True)
