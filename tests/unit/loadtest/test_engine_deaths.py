"""The real gateway over engines that speak an engine's whole protocol: each is killed twice under streams, and no client notices."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from alphabet_target import write_target

from loadtest.client import StreamResult, new_session
from loadtest.closed_loop import keep_busy
from loadtest.exposition import total
from loadtest.mock_engine import Pace
from loadtest.processes import running_process
from loadtest.recital import MODEL, is_recital
from loadtest.rig import MockAddress, gateway_config, mock_addresses, running_gateway
from loadtest.traffic import Prompt

CONCURRENCY = 8
PROMPTS = [Prompt(str(index), ({"role": "user", "content": f"say it {index}"},)) for index in range(40)]

pytestmark = pytest.mark.rig


@pytest.fixture
def target_dir(tmp_path: Path) -> Path:
    return write_target(tmp_path / "target")


def test_no_client_notices_that_engines_are_killed_in_turn_and_twice(target_dir: Path) -> None:
    addresses = mock_addresses(2, Pace(first_token_s=0.05, between_tokens_s=0.02), target_dir=str(target_dir))
    results: list[StreamResult] = []
    num_moves = asyncio.run(drill(addresses, results))
    assert [result.error for result in results if not result.is_ok] == []
    assert [result.text for result in results if not is_recital(result.text, result.num_tokens)] == []
    assert num_moves >= 2, "streams went on elsewhere"


async def drill(addresses: Sequence[MockAddress], results: list[StreamResult]) -> float:
    """Kill one engine after the other under streams, twice; returns how many streams went on elsewhere."""
    is_over, draw = False, random.Random(0)
    async with AsyncExitStack() as stack:

        async def start(address: MockAddress) -> int:
            process = running_process(address.argv(), ready_url=f"{address.url}/health")
            return (await stack.enter_async_context(process)).pid

        pids = [await start(address) for address in addresses]
        url = await stack.enter_async_context(running_gateway(gateway_config(addresses)))
        busy = keep_busy(
            url, MODEL, PROMPTS, concurrency=CONCURRENCY, should_stop=lambda: is_over, on_result=results.append,
            options=lambda _passes: {"max_tokens": draw.randint(40, 80)},  # of one length, they would all begin and end at once
        )  # fmt: skip
        load = asyncio.create_task(busy)
        async with asyncio.timeout(240.0):
            for index, address in [*enumerate(addresses)] * 2:
                await until(lambda: metric(url, "paceline_engine_ready"), 2.0)
                # Streams run on both once as many have begun since.
                num_before = len(results)
                while len(results) < num_before + 2 * CONCURRENCY:
                    await asyncio.sleep(0.02)
                os.killpg(pids[index], signal.SIGKILL)
                pids[index] = await start(address)
            await until(lambda: metric(url, "paceline_engine_ready"), 2.0)
            is_over = True
            await load
        return await metric(url, "paceline_stream_moves_total")


async def metric(url: str, name: str) -> float:
    async with new_session(1) as session, session.get(f"{url}/metrics") as response:
        return total(await response.text(), name) or 0.0


async def until(measure: Callable[[], Awaitable[float]], wanted: float) -> None:
    while await measure() != wanted:
        await asyncio.sleep(0.05)
