"""The mock engine on a real socket, alone and behind the real gateway process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio

from loadtest.bars.overhead import until_indexed
from loadtest.client import StreamResult, new_session, stream_chat
from loadtest.exposition import total
from loadtest.kv_events import CHAIN_BLOCKS
from loadtest.mock_engine import MockEngine, Pace, serving
from loadtest.recital import LETTERS, MODEL, Alphabet, is_recital
from loadtest.rig import gateway_config, mock_addresses, running_gateway, running_mocks
from loadtest.traffic import Prompt
from wire.control import EngineStatus
from wire.messages import TOPIC_STATS, EngineStats, decode
from wire.ports import free_ports

QUICK = Pace(first_token_s=0.01, between_tokens_s=0.001)
PROMPT = Prompt("p", ({"role": "user", "content": "say it"},))
Value = TypeVar("Value")


def with_engine(use: Callable[[aiohttp.ClientSession, str], Awaitable[Value]], alphabet: Alphabet | None = None) -> Value:
    async def run() -> Value:
        (events_port,) = free_ports(1)
        engine = MockEngine("engine-0", QUICK, alphabet or Alphabet())
        async with serving(engine, 0, f"tcp://127.0.0.1:{events_port}") as url, new_session(4) as session:
            return await use(session, url)

    return asyncio.run(run())


def post(path: str, body: dict[str, Any]) -> Any:
    async def use(session: aiohttp.ClientSession, url: str) -> Any:
        async with session.post(url + path, json=body) as response:
            return await response.json()

    return with_engine(use)


def test_a_chat_stream_is_the_alphabet_as_long_as_asked_for() -> None:
    result = with_engine(
        lambda session, url: stream_chat(session, url, MODEL, PROMPT, options={"max_tokens": 30, "return_token_ids": True})
    )
    assert result.is_ok
    assert result.text == LETTERS + LETTERS[:4]
    assert (result.num_completion_tokens, len(result.token_ids), result.finish_reason) == (30, 30, "length")
    assert result.first_byte_s is not None
    assert 0.01 <= result.first_byte_s <= result.chunk_times_s[-1] - result.sent_at_s


def test_a_prompt_of_token_ids_is_continued() -> None:
    ids = Alphabet().ids
    whole = post("/v1/completions", {"model": MODEL, "prompt": [5, ids[24]], "max_tokens": 3, "return_token_ids": True})
    assert whole["choices"][0]["text"] == "zab"
    assert whole["choices"][0]["token_ids"] == [ids[25], ids[0], ids[1]]
    assert whole["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    assert post("/v1/completions", {"prompt": "in words", "max_tokens": 2})["choices"][0]["text"] == "ab"


def test_letters_have_the_ids_of_the_targets_vocabulary(tmp_path: Path) -> None:
    vocabulary = {letter: 7 + index for index, letter in enumerate(LETTERS)}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    alphabet = Alphabet(tmp_path)
    assert alphabet.ids[:3] == [7, 8, 9]
    assert alphabet.after([1, 9]) == 3


def test_another_model_is_refused_as_vllm_does() -> None:
    assert post("/v1/completions", {"model": "else", "prompt": "p"})["error"]["code"] == 404


@pytest.mark.parametrize(
    ("text", "is_one"),
    [("abc", True), (LETTERS + "abc", True), ("ab", False), ("acd", False), ("abb", False), ("abcabc", False)],
)
def test_a_recital_lacks_nothing_and_repeats_nothing(text: str, is_one: bool) -> None:
    num_tokens = len(text) if text != "ab" else 3
    assert is_recital(text, num_tokens) is is_one


def test_its_status_and_its_stats_are_an_engines() -> None:
    async def use(session: aiohttp.ClientSession, url: str) -> EngineStatus:
        async with session.get(f"{url}/paceline/status") as response:
            return msgspec.json.decode(await response.read(), type=EngineStatus)

    assert with_engine(use).engine_id == "engine-0"

    async def listen() -> Any:
        (events_port,) = free_ports(1)
        endpoint = f"tcp://127.0.0.1:{events_port}"
        with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as socket:
            socket.subscribe(TOPIC_STATS)
            socket.connect(endpoint)
            async with serving(MockEngine("engine-7", QUICK, Alphabet()), 0, endpoint):
                return decode((await asyncio.wait_for(socket.recv_multipart(), 120))[1])

    stats = asyncio.run(listen())
    assert isinstance(stats, EngineStats)
    assert stats.engine_id == "engine-7"


def test_the_real_gateway_serves_in_front_of_two_mock_engines() -> None:
    async def run() -> list[StreamResult]:
        addresses = mock_addresses(2, QUICK)
        async with (
            running_mocks(addresses) as pids,
            running_gateway(gateway_config(addresses)) as url,
            new_session(4) as session,
        ):
            assert len(set(pids)) == 2
            options = {"max_tokens": 40}
            return await asyncio.gather(*(stream_chat(session, url, MODEL, PROMPT, options=options) for _ in range(4)))

    for result in asyncio.run(run()):
        assert result.is_ok, result.error
        assert is_recital(result.text, 40)
        assert result.request_id


def test_the_real_gateway_learns_of_the_kv_of_mock_engines() -> None:
    num_blocks = 4 * CHAIN_BLOCKS

    async def run() -> str:
        (port,) = free_ports(1)
        endpoint = f"tcp://127.0.0.1:{port}"
        addresses = mock_addresses(2, QUICK, kv_events_endpoint=endpoint, num_kv_blocks=num_blocks)
        async with (
            running_mocks(addresses),
            running_gateway(gateway_config(addresses), kv_events_endpoint=endpoint) as url,
            new_session(4) as session,
        ):
            await until_indexed(url, 2 * num_blocks // CHAIN_BLOCKS)
            long = Prompt("p", ({"role": "user", "content": "say it " * 100},))
            results = [await stream_chat(session, url, MODEL, long, options={"max_tokens": 40}) for _ in range(4)]
            assert all(result.is_ok for result in results)
            await until_indexed(url, 2 * num_blocks // CHAIN_BLOCKS + len(results))
            async with session.get(f"{url}/metrics") as response:
                return await response.text()

    page = asyncio.run(run())
    assert total(page, "paceline_kv_events_total", kind="removed") == 4
    assert total(page, "paceline_kv_events_total", kind="orphan") is None
    assert not total(page, "paceline_kv_event_gaps_total")
    assert not total(page, "paceline_bad_kv_events_total")
