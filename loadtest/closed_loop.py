"""Closed-loop load: a constant number of requests in flight."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from loadtest.client import StreamResult, new_session, stream_chat
from loadtest.traffic import Prompt

MAX_TOKENS = 192
RESAMPLING_TEMPERATURE = 0.6

_PAUSE_S = 0.5
_ATTEMPTS = 3


async def run_batch(
    url: str,
    model: str,
    prompts: Sequence[Prompt],
    *,
    concurrency: int,
    options: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
) -> list[StreamResult]:
    """Every prompt once, results in prompt order."""
    gate = asyncio.Semaphore(concurrency)
    async with new_session(concurrency) as session:

        async def one(prompt: Prompt) -> StreamResult:
            async with gate:
                return await stream_chat(session, url, model, prompt, options=options, headers=headers)

        return await asyncio.gather(*(one(prompt) for prompt in prompts))


async def answer_each(
    url: str,
    model: str,
    prompts: Sequence[Prompt],
    *,
    concurrency: int,
    should_stop: Callable[[], bool],
    should_wait: Callable[[], bool],
    on_result: Callable[[StreamResult], None],
    options: Mapping[str, Any] | None = None,
) -> None:
    """Every prompt until it is answered, or three times in vain; `on_result` gets its last result.

    Ends early when told to stop, and sends nothing while told to wait; what is under way goes on in both cases.
    """
    waiting = deque((prompt, 1) for prompt in prompts)
    async with new_session(concurrency) as session:

        async def worker() -> None:
            while waiting and not should_stop():
                if should_wait():
                    await asyncio.sleep(_PAUSE_S)
                    continue
                prompt, attempt = waiting.popleft()
                result = await stream_chat(session, url, model, prompt, options=options)
                if result.is_ok or attempt == _ATTEMPTS:
                    on_result(result)
                else:
                    waiting.append((prompt, attempt + 1))
                    await asyncio.sleep(_PAUSE_S)

        await asyncio.gather(*(worker() for _ in range(concurrency)))


async def keep_busy(
    url: str,
    model: str,
    prompts: Sequence[Prompt],
    *,
    concurrency: int,
    should_stop: Callable[[], bool],
    on_result: Callable[[StreamResult], None] = lambda _result: None,
    options: Callable[[int], Mapping[str, Any]] | None = None,
    headers: Mapping[str, str] | None = None,
) -> None:
    """Send prompts round and round until told to stop, then finish those in flight.

    `options` gets the number of the pass over the prompts; by default the first pass is greedy and later ones sample, so
    that repeated prompts do not repeat their answers.
    """
    choose = options or default_options
    numbers = itertools.count()
    async with new_session(concurrency) as session:

        async def worker() -> None:
            while not should_stop():
                passes, index = divmod(next(numbers), len(prompts))
                result = await stream_chat(session, url, model, prompts[index], options=choose(passes), headers=headers)
                on_result(result)
                if not result.is_ok:
                    await asyncio.sleep(_PAUSE_S)

        await asyncio.gather(*(worker() for _ in range(concurrency)))


def default_options(passes: int) -> dict[str, Any]:
    return {"max_tokens": MAX_TOKENS, "temperature": 0.0 if passes == 0 else RESAMPLING_TEMPERATURE}
