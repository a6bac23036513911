"""Remote prefill from client to client: gateway, prefill engine, NIXL, decode engine, with the real model and a router that chose it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
from conftest import make_drafts
from live_engine import TOKEN, LiveEngine
from live_pair import BYTES, EXPIRED, FAILED, HITS, Pair, start_pair

from loadtest.client import DONE, events, new_session
from loadtest.exposition import total
from loadtest.rig import running_gateway
from server.relay.prefill import RELEASE_MODEL

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
FACTS = "".join(
    f"Fact {number}: box {number} holds {number * 7 % 31} red and {number * 5 % 23} blue balls. " for number in range(32)
)
QUESTION = f"{FACTS}Which boxes hold more red balls than blue ones, and why?"
MAX_TOKENS = 32
NUM_BUSY = 3
KV_USAGE, PREFILLED = "vllm:kv_cache_usage_perc", "vllm:prompt_tokens_total"
DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def pair(real_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    state_dir = tmp_path_factory.mktemp("real-pair-state")
    make_drafts(state_dir, real_target, draft_vocab_size=8192, count=1)
    with start_pair(real_target, state_dir, 8192) as pair:
        yield pair


@dataclass
class Answer:
    """A stream as its client saw it."""

    headers: Mapping[str, str]
    """Of any case."""
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    arrivals_s: list[float] = field(default_factory=list)
    """Of the events with text."""
    is_complete: bool = False


class Client:
    """Of a gateway in front of a pair."""

    def __init__(self, pair: Pair, url: str, session: aiohttp.ClientSession) -> None:
        self.pair = pair
        self._url = url
        self._session = session

    async def ask(
        self, question: str, *, salt: str, max_tokens: int = MAX_TOKENS, on_text: Callable[[], None] = lambda: None
    ) -> Answer:
        body = {
            "model": self.pair.decode.model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_salt": salt,
        }
        async with self._session.post(self._url + CHAT, json=body, headers={"X-Request-Id": salt}) as response:
            assert (response.status, response.content_type) == (200, "text/event-stream"), await response.text()
            answer = Answer(response.headers)
            async for data in events(response.content):
                if data == DONE:
                    answer.is_complete = True
                    break
                chunk = json.loads(data)
                answer.usage = chunk.get("usage") or answer.usage
                text = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
                if text:
                    answer.text += text
                    answer.arrivals_s.append(time.monotonic())
                    on_text()
        return answer

    async def metric(self, name: str, **labels: str) -> float:
        """Of the gateway's page, 0 where there is no such series."""
        async with self._session.get(self._url + "/metrics") as response:
            return total(await response.text(), name, **labels) or 0.0

    @asynccontextmanager
    async def busy_decode_engine(self) -> AsyncIterator[None]:
        """Others' answers to short questions run there meanwhile."""
        started = [asyncio.Event() for _ in range(NUM_BUSY)]
        others = [
            asyncio.create_task(self.ask("Tell a story.", salt=f"other-{n}", max_tokens=900, on_text=event.set))
            for n, event in enumerate(started)
        ]
        try:
            await asyncio.gather(*(event.wait() for event in started))
            yield
            assert not any(other.done() for other in others)
        finally:
            for other in others:
                other.cancel()
            await asyncio.gather(*others, return_exceptions=True)


@asynccontextmanager
async def gateway(pair: Pair) -> AsyncIterator[Client]:
    """A gateway process that knows both engines."""
    config = {
        **{table: {} for table in ("gateway", "admission", "canary", "routing")},
        "engines": [endpoint.model_dump() for endpoint in pair.endpoints],
        "target_dir": str(pair.decode.target_dir),
        "state_dir": str(pair.decode.state_dir),
    }
    started = running_gateway(config, engine_token=TOKEN, kv_events_endpoint=pair.kv_events_endpoint)
    async with asyncio.timeout(4 * DEADLINE_S), started as url, new_session(8) as session:
        client = Client(pair, url, session)
        await until(lambda: client.metric("paceline_engine_ready"), 2.0)
        yield client


async def until(measure: Callable[[], Awaitable[float]], wanted: float) -> None:
    """Wait until what is measured is what is wanted."""
    deadline_s = time.monotonic() + DEADLINE_S
    while (measured := await measure()) != wanted:
        assert time.monotonic() < deadline_s, f"{measured}, not {wanted}"
        await asyncio.sleep(0.05)


async def settled_usage(engine: LiveEngine) -> float:
    """Share of KV blocks in use, after a step: metrics and notifications move with steps."""
    await asyncio.to_thread(engine.complete, [1, 2, 3], max_tokens=1)
    return await asyncio.to_thread(engine.metric, KV_USAGE)


class Held(NamedTuple):
    """What a prefill engine holds for others, and how many leases ran out so far."""

    usage: float
    num_expired: float


async def held(engine: LiveEngine) -> Held:
    return Held(await settled_usage(engine), *await read(engine, EXPIRED))


async def until_freed(engine: LiveEngine, before: Held) -> None:
    """Wait until an engine holds no more than before, which is not because a lease ran out."""

    async def more() -> float:
        return max(await settled_usage(engine) - before.usage, 0.0)

    await until(more, 0.0)
    assert (await held(engine)).num_expired == before.num_expired


async def read(engine: LiveEngine, *names: str) -> list[float]:
    return [await asyncio.to_thread(engine.metric, name) for name in names]


def test_prompt_for_a_busy_decode_engine_is_prefilled_elsewhere_and_pulled(pair: Pair) -> None:
    async def scenario() -> None:
        async with gateway(pair) as client:
            local = await client.ask(QUESTION, salt="local")
            assert local.headers["X-Paceline-Kv-Path"] == "combined"
            assert await client.metric("paceline_routed_total", reason="local_cheaper") == 1.0
            before = await held(pair.prefill)
            (prefilled,) = await read(pair.prefill, PREFILLED)
            hits, moved_bytes = await read(pair.decode, HITS, BYTES)
            async with client.busy_decode_engine():
                remote = await client.ask(QUESTION, salt="remote")
            num_tokens = local.usage["prompt_tokens"]

            assert (remote.text, remote.is_complete) == (local.text, True)
            assert {name: remote.usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")} == {
                "prompt_tokens": num_tokens,
                "completion_tokens": MAX_TOKENS,
                "total_tokens": num_tokens + MAX_TOKENS,
            }
            assert remote.usage["prompt_tokens_details"]["cached_tokens"] == 0
            assert len(remote.arrivals_s) > 4
            assert remote.arrivals_s[-1] - remote.arrivals_s[0] > 0.1
            assert {name.lower(): value for name, value in remote.headers.items() if name.lower().startswith("x-")} == {
                "x-request-id": "remote",
                "x-paceline-draft-version": "0",
                "x-paceline-target-version": "0",
                "x-paceline-kv-path": "remote_prefill",
            }

            assert await client.metric("paceline_routed_total", path="remote_prefill", reason="remote_cheaper") == 1.0
            assert await client.metric("paceline_routed_total", path="remote_prefill") == 1.0
            assert await client.metric("paceline_prefill_failures_total") == 0.0
            layout = pair.decode.ok("/paceline/status")["kv"]
            num_blocks = -(-num_tokens // layout["block_size_tokens"])
            num_bytes = num_blocks * layout["block_size_tokens"] * layout["bytes_per_token"]
            assert await read(pair.decode, HITS, BYTES, FAILED) == [hits + num_tokens, moved_bytes + num_bytes, 0.0]
            assert await read(pair.prefill, PREFILLED) == [prefilled + num_tokens]

            assert await client.metric("paceline_kv_leases_total") == await client.metric(
                "paceline_kv_leases_total", end="pulled"
            )
            assert await client.metric("paceline_kv_leases_total", end="pulled") == 1.0
            assert await client.metric("paceline_kv_leases_held") == 0.0
            await until_freed(pair.prefill, before)

    asyncio.run(scenario())


def test_client_that_leaves_during_the_prefill_leaves_no_lease(pair: Pair) -> None:
    async def scenario() -> None:
        async with gateway(pair) as client:
            before = await held(pair.prefill)
            hits = await read(pair.decode, HITS)
            async with client.busy_decode_engine():
                leaving = asyncio.create_task(client.ask(QUESTION, salt="leaving"))
                await until(lambda: client.metric("paceline_engine_requests_in_flight", engine="prefill-0"), 1.0)
                leaving.cancel()
                await asyncio.gather(leaving, return_exceptions=True)
                await until(lambda: client.metric("paceline_requests_total", outcome="disconnected"), 1.0)
                await until(lambda: client.metric("paceline_engine_requests_in_flight", engine="prefill-0"), 0.0)
                assert await client.metric("paceline_engine_requests_in_flight", engine="decode-0") == NUM_BUSY
                assert await client.metric("paceline_kv_leases_held") == 0.0
                await until_freed(pair.prefill, before)
            assert await client.metric("paceline_routed_total", path="remote_prefill") == 1.0
            assert await client.metric("paceline_kv_leases_total", end="pulled") == 0.0
            assert await client.metric("paceline_kv_leases_total", end="expired") == 0.0
            assert await read(pair.decode, HITS) == hits
            await until(lambda: client.metric("paceline_requests_in_flight"), 0.0)

    asyncio.run(scenario())


def test_lease_is_released_by_a_request_that_is_refused(pair: Pair) -> None:
    pair.complete(FACTS[:200], salt="handshake")
    before = asyncio.run(held(pair.prefill))
    params = pair.prefilled(FACTS, "released")
    assert asyncio.run(settled_usage(pair.prefill)) > before.usage
    num_generated = pair.decode.metric("vllm:generation_tokens_total")
    body = {"model": RELEASE_MODEL, "prompt": [0], "max_tokens": 1, "kv_transfer_params": params}
    status, _ = pair.decode.call(COMPLETIONS, body)
    assert status == 404
    asyncio.run(until_freed(pair.prefill, before))
    assert pair.decode.metric("vllm:generation_tokens_total") == num_generated
