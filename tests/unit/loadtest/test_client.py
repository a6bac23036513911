"""The client against a small server that answers in every way an engine can, good and bad."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from loadtest.client import StreamResult, new_session, stream_chat
from loadtest.closed_loop import keep_busy, run_batch
from loadtest.traffic import Prompt

PROMPTS = tuple(Prompt(str(index), ({"role": "user", "content": str(index)},)) for index in range(4))


def chunk(text: str = "", *, token_ids: list[int] | None = None, finish: str | None = None) -> str:
    return json.dumps({"choices": [{"delta": {"content": text}, "token_ids": token_ids, "finish_reason": finish}]})


GOOD = [chunk("a", token_ids=[1, 2]), chunk("b", token_ids=[3]), chunk(finish="length"),
        json.dumps({"choices": [], "usage": {"completion_tokens": 3}}), "[DONE]"]  # fmt: skip


@asynccontextmanager
async def server(
    events: list[str], *, status: int = 200, piece_bytes: int = 1 << 20
) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    seen: list[dict[str, Any]] = []

    async def chat(request: web.Request) -> web.StreamResponse:
        seen.append({**await request.json(), "headers": dict(request.headers)})
        if status != 200:
            return web.json_response({"error": {"message": "queue is full"}}, status=status)
        response = web.StreamResponse(headers={"X-Paceline-Draft-Version": "7"})
        await response.prepare(request)
        for event in events:
            data = f"data: {event}\r\n\r\n".encode()
            for start in range(0, len(data), piece_bytes):
                await response.write(data[start : start + piece_bytes])
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", seen
    finally:
        await runner.cleanup()


def ask(events: list[str], *, status: int = 200, piece_bytes: int = 1 << 20, **options: Any) -> StreamResult:
    async def run() -> StreamResult:
        async with server(events, status=status, piece_bytes=piece_bytes) as (url, _seen), new_session(1) as session:
            return await stream_chat(session, url, "m", PROMPTS[0], options=options)

    return asyncio.run(run())


def test_a_whole_answer_is_ok_and_counted() -> None:
    result = ask(GOOD)
    assert result.is_ok
    assert (result.text, result.token_ids, result.num_tokens) == ("ab", [1, 2, 3], 3)
    assert len(result.chunk_times_s) == 2
    assert result.sent_at_s <= result.chunk_times_s[0] <= result.chunk_times_s[1] <= result.ended_at_s
    assert result.draft_version == "7"
    assert result.first_byte_s == result.chunk_times_s[0] - result.sent_at_s


def test_events_that_arrive_in_pieces_are_put_together() -> None:
    result = ask([chunk("é", token_ids=[1]), *GOOD], piece_bytes=7)
    assert result.is_ok
    assert (result.text, result.token_ids) == ("éab", [1, 1, 2, 3])


def test_a_stream_without_its_end_is_truncated() -> None:
    result = ask(GOOD[:2])
    assert not result.is_ok
    assert result.is_truncated


def test_an_error_chunk_is_a_failure_and_not_a_truncation() -> None:
    result = ask([GOOD[0], json.dumps({"error": {"message": "engine died"}})])
    assert (result.is_ok, result.is_truncated, result.error) == (False, False, "engine died")


def test_an_error_chunk_before_the_end_mark_is_a_failure_and_no_proper_one() -> None:
    error = {"message": "engine died", "type": "server_error", "param": None, "code": "engine_failed"}
    result = ask([GOOD[0], json.dumps({"error": error}), "[DONE]"])
    assert (result.is_ok, result.has_one_openai_error) == (False, False)
    assert ask([GOOD[0], json.dumps({"error": error})]).has_one_openai_error
    assert not ask([GOOD[0], json.dumps({"error": error}), json.dumps({"error": error})]).has_one_openai_error
    assert not ask([json.dumps({"error": "engine died"})]).has_one_openai_error
    assert not ask(GOOD).has_one_openai_error


def test_a_null_error_is_none() -> None:
    assert ask([json.dumps({"error": None, **json.loads(GOOD[0])}), *GOOD[1:]]).is_ok


def test_what_the_server_counts_and_says_of_itself_is_kept() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
    told = {"per_step_accepted": [0, 2], "per_step_drafted": [3, 2], "num_spec_tokens": 3, "mean_acceptance_length": 2.0}
    metrics = {"speculative_decoding": told}
    result = ask([*GOOD[:3], json.dumps({"choices": [], "usage": usage, "metrics": metrics}), "[DONE]"])
    assert (result.num_prompt_tokens, result.num_completion_tokens, result.num_cached_tokens) == (9, 3, 4)
    assert (result.accepted_per_step, result.drafted_per_step, result.num_spec_tokens) == ([0, 2], [3, 2], 3)
    assert (result.draft_version, result.target_version, result.kv_path) == ("7", None, None)


def test_chunks_are_counted_by_a_running_count_where_they_bring_no_ids() -> None:
    counts = (3, 4, 9)
    events = [json.dumps({"usage": {"completion_tokens": count}, **json.loads(chunk("x"))}) for count in counts]
    assert ask([*events, chunk(finish="stop"), "[DONE]"]).chunk_token_counts == [3, 1, 5]
    assert ask([chunk("x"), chunk("y", finish="stop"), "[DONE]"]).chunk_token_counts == [1, 1]


def counted(event: str, num_tokens: int) -> str:
    return json.dumps({**json.loads(event), "usage": {"completion_tokens": num_tokens}})


def test_an_end_without_text_is_a_chunk_where_the_server_counts_its_token() -> None:
    for num_tokens, counts in ((3, [1, 1, 1]), (2, [1, 1])):
        usage = json.dumps({"choices": [], "usage": {"completion_tokens": num_tokens}})
        result = ask([chunk(), chunk("a"), chunk("b"), chunk(finish="stop"), usage, "[DONE]"])
        assert (result.is_ok, result.text, result.chunk_token_counts) == (True, "ab", counts)
        assert len(result.chunk_times_s) == len(counts)
        assert result.chunk_times_s == sorted(result.chunk_times_s)
        # Some servers count in the last event itself.
        assert ask([chunk("a"), chunk("b"), counted(chunk(finish="stop"), num_tokens), "[DONE]"]).chunk_token_counts == counts


def test_a_running_count_tells_of_tokens_without_text() -> None:
    events = [counted(chunk(), 0), counted(chunk("a"), 1), counted(chunk(), 2), counted(chunk(finish="stop"), 3)]
    assert ask([*events, "[DONE]"]).chunk_token_counts == [1, 1, 1]


def test_reasoning_and_tool_calls_are_tokens_and_no_text() -> None:
    deltas = [{"reasoning": "hm"}, {"reasoning_content": "hm"}, {"tool_calls": [{"index": 0}]}, {"role": "assistant"}]
    events = [json.dumps({"choices": [{"delta": delta, "finish_reason": None}]}) for delta in deltas]
    result = ask([*events, chunk("a", finish="stop"), "[DONE]"])
    assert (len(result.chunk_times_s), result.text) == (4, "a")


def test_a_client_that_leaves_is_neither_failed_nor_truncated() -> None:
    async def run() -> tuple[StreamResult, list[str]]:
        gone: list[str] = []

        async def chat(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(f"data: {GOOD[0]}\n\n".encode())
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                gone.append("client")
                raise
            return response

        app = web.Application()
        app.router.add_post("/v1/chat/completions", chat)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            async with new_session(1) as session:
                result = await stream_chat(session, url, "m", PROMPTS[0], patience=asyncio.timeout(0.3))
                await asyncio.sleep(0.1)
        finally:
            await runner.cleanup()
        return result, gone

    result, gone = asyncio.run(run())
    assert (result.has_left, result.is_ok, result.is_truncated, result.error, result.text) == (True, False, False, None, "a")
    assert gone == ["client"]


def test_garbage_in_a_stream_is_a_failure() -> None:
    for text in ("{", '{"x":' + "[" * 100_000 + "]" * 100_000 + "}"):
        assert "not JSON" in (ask([text]).error or "")


def test_a_refusal_is_kept_with_its_reason() -> None:
    result = ask([], status=503)
    assert (result.status, result.is_ok) == (503, False)
    assert "queue is full" in (result.error or "")
    assert result.error_bodies == [{"message": "queue is full"}]
    assert not result.has_one_openai_error


def test_nobody_listening_is_a_result_not_an_exception() -> None:
    async def run() -> StreamResult:
        async with new_session(1) as session:
            return await stream_chat(session, "http://127.0.0.1:9", "m", PROMPTS[0])

    assert not asyncio.run(run()).is_ok


def test_a_batch_keeps_the_order_of_its_prompts_and_its_options() -> None:
    async def run() -> tuple[list[StreamResult], list[dict[str, Any]]]:
        async with server(GOOD) as (url, seen):
            options, headers = {"max_tokens": 5}, {"X-Paceline-Domain": "code"}
            return await run_batch(url, "m", PROMPTS, concurrency=2, options=options, headers=headers), seen

    results, seen = asyncio.run(run())
    assert [result.prompt_id for result in results] == ["0", "1", "2", "3"]
    assert all(body["max_tokens"] == 5 and body["stream"] and body["headers"]["X-Paceline-Domain"] == "code" for body in seen)


def test_a_closed_loop_goes_round_and_samples_from_the_second_pass_on() -> None:
    results: list[StreamResult] = []

    async def run() -> list[dict[str, Any]]:
        async with server(GOOD) as (url, seen):
            await keep_busy(url, "m", PROMPTS, concurrency=2, should_stop=lambda: len(results) >= 9, on_result=results.append)
            return seen

    seen = asyncio.run(run())
    temperatures = [body["temperature"] for body in seen]
    assert len(results) >= 9
    assert set(temperatures[:4]) == {0.0}
    assert set(temperatures[4:]) == {0.6}
