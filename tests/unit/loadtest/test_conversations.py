"""Conversations against a small server that remembers what it was asked."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from loadtest.client import StreamResult
from loadtest.conversations import conversations, hold
from loadtest.processes import SystemUnderTestError
from loadtest.traffic import Prompt

PROBLEMS = [Prompt(str(index), ({"role": "user", "content": f"problem {index}"},)) for index in range(4)]


def held(*, num_turns: int = 3, is_cut: bool = False) -> tuple[list[list[dict[str, str]]], list[StreamResult]]:
    """What the server was asked in the order of arrival, and the results."""
    asked: list[list[dict[str, str]]] = []

    async def chat(request: web.Request) -> web.StreamResponse:
        messages = (await request.json())["messages"]
        asked.append(messages)
        response = web.StreamResponse()
        await response.prepare(request)
        events: list[Any] = [
            {"choices": [{"delta": {"content": f"answer to {messages[-1]['content']}"}, "finish_reason": "stop"}]}
        ]
        for event in events:
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        if not is_cut:
            await response.write(b"data: [DONE]\n\n")
        return response

    async def run() -> list[StreamResult]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", chat)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            talks = conversations(PROBLEMS, name="a", number=2, num_turns=num_turns)
            return await hold(url, "m", talks, options={}, mean_pause_s=0.01, seed=0)
        finally:
            await runner.cleanup()

    return asked, asyncio.run(run())


def test_every_turn_carries_the_whole_history_with_the_real_answers() -> None:
    asked, results = held()
    assert [result.prompt_id for result in results] == ["a/0/0", "a/0/1", "a/0/2", "a/1/0", "a/1/1", "a/1/2"]
    longest = [messages for messages in asked if len(messages) == 6 and messages[1]["content"] == "problem 1"]
    assert len(longest) == 1
    roles = [message["role"] for message in longest[0]]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user"]
    assert longest[0][2]["content"] == "answer to problem 1"
    assert longest[0][4]["content"] == f"answer to {longest[0][3]['content']}"


def test_conversations_of_one_name_share_their_system_prompt_and_no_other_name_does() -> None:
    first, second = conversations(PROBLEMS, name="a", number=2, num_turns=6)
    (other,) = conversations(PROBLEMS, name="b", number=1, num_turns=6)
    assert first.system == second.system
    assert first.user_turns[0] != second.user_turns[0]
    assert len(first.user_turns) == 6
    shared = next(index for index, (one, two) in enumerate(zip(first.system, other.system, strict=True)) if one != two)
    assert shared < 64, "a shared beginning of a KV block's length would be found in another block's cache"


def test_a_turn_that_fails_ends_the_measurement() -> None:
    with pytest.raises(SystemUnderTestError, match="turn a/"):
        held(is_cut=True)
