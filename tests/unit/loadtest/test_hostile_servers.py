"""The client against servers that answer what no server should: every request ends with a result that can be written down."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress

import msgspec
import pytest
from waiting import DEADLINE_S

from loadtest import client
from loadtest.client import StreamResult, longest_answer_s, new_session, stream_chat
from loadtest.run.sender import outcome_of
from loadtest.run.target import Target, TargetError, find
from loadtest.traffic import Prompt

PROMPT = Prompt("p", ({"role": "user", "content": "q"},))
WORD = b'data: {"choices": [{"delta": {"content": "word"}, "finish_reason": null}]}\n\n'
END = b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
ERROR = b'data: {"error": {"message": "it broke"}}\n\n'


def answer(body: bytes, *headers: bytes, status: bytes = b"200 OK", kind: bytes = b"text/event-stream") -> bytes:
    return b"\r\n".join([b"HTTP/1.1 " + status, b"Content-Type: " + kind, *headers, b"Connection: close", b"", body])


def ask(data: bytes) -> StreamResult:
    """Send one request to a server that answers with `data`, whatever it is asked."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(data)
        await writer.drain()
        writer.close()

    async def run() -> StreamResult:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server, new_session(1) as session:
            port = server.sockets[0].getsockname()[1]
            return await stream_chat(session, f"http://127.0.0.1:{port}", "m", PROMPT)

    result = asyncio.run(run())
    assert msgspec.json.decode(msgspec.json.encode(result), type=StreamResult).error == result.error
    return result


@pytest.mark.parametrize(
    ("data", "outcome", "reason"),
    [
        (answer(WORD + END), "ok", None),
        (answer(b": ping\n\nevent: x\nid: 1\nretry: 5\n" + WORD + END), "ok", None),
        (answer(WORD + END, kind=b"application/json"), "ok", None),
        (answer(WORD), "truncated", None),
        (answer(b""), "truncated", None),
        (answer(b": ping\n\n"), "truncated", None),
        (answer(WORD + ERROR), "failed", "it broke"),
        (answer(WORD + ERROR + END), "failed", "it broke"),
        (answer(b'{"error": {"message": "no such model"}}', kind=b"application/json"), "failed", "no such model"),
        (answer(b'{\n "choices": []\n}\n', kind=b"application/json"), "failed", "no stream of events"),
        (answer(b"<html>\n<body>Log in</body>", kind=b"text/html"), "failed", "Log in"),
        (answer(b'data: {"choices": [{"delta": {"content": "\xc3"}}]}\n\n' + END), "failed", "UTF-8"),
        (answer(b"data: {\n\n" + END), "failed", "not JSON"),
        (answer(b'data: {"usage": {"completion_tokens": -3}}\n\n' + END), "failed", "completion_tokens"),
        (answer(b'data: {"usage": {"completion_tokens": 1%s}}\n\n' % (b"0" * 50) + END), "failed", "completion_tokens"),
        (answer(b'data: {"error": %s1%s}\n\n' % (b"[" * 50_000, b"]" * 50_000) + END), "failed", "recursion"),
        (answer(b"[" * 60_000, status=b"500 Internal Server Error"), "failed", "[[["),
        (answer(b"caf\xe9", status=b"503 Service Unavailable"), "failed", "caf"),
        (answer(b"", status=b"502 Bad Gateway"), "failed", "502"),
        (answer(b"", b"Location: http://127.0.0.1:1/v1/chat/completions", status=b"307 T"), "failed", "redirected to http"),
        (answer(b"no gzip at all", b"Content-Encoding: gzip"), "failed", "gzip"),
        (answer(WORD, b"Content-Length: 9999"), "failed", "payload is not completed"),
        (b"\x00\x01\x02 no HTTP\r\n\r\n", "failed", "HTTP"),
        (b"", "failed", "Disconnected"),
    ],
)  # fmt: skip
def test_an_answer_is_kept_as_what_it_is(data: bytes, outcome: str, reason: str | None) -> None:
    result = ask(data)
    assert outcome_of(result) == outcome
    assert (result.error is None) if reason is None else (reason in (result.error or "")), result.error


def test_headers_that_are_no_text_can_be_written_down() -> None:
    result = ask(answer(WORD + END, b"X-Paceline-Draft-Version: 7\xff", b"X-Request-Id: \xc3\xa9"))
    assert result.is_ok
    assert (result.draft_version or "")[0] == "7"
    assert result.request_id == "é"


def test_a_long_error_is_kept_by_its_beginning() -> None:
    long = json.dumps({"error": {"message": "x" * 100_000}}).encode()
    assert len(ask(answer(b"data: " + long + b"\n\n")).error or "") == 500
    assert len(ask(answer(long, status=b"500 E")).error or "") == 500
    assert len(ask(answer(long)).error or "") == 500


def test_an_answer_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_CHUNKS", 10)
    result = ask(answer(WORD * 100 + END))
    assert (outcome_of(result), len(result.chunk_times_s)) == ("failed", 11)
    monkeypatch.setattr(client, "MAX_EVENT_BYTES", 1 << 20)
    result = ask(answer(b"data: " + b"x" * (8 << 20)))
    assert outcome_of(result) == "failed"
    assert "longer than" in (result.error or "")


@pytest.mark.parametrize(
    "piece", [b": ping\n\n", WORD, b'data: {"choices": []}\n\n'], ids=["keep-alives", "tokens", "empty chunks"]
)
def test_a_stream_that_never_ends_fails_in_time_with_a_reason_of_its_own(piece: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer(WORD))
        with suppress(ConnectionError):
            while True:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.01)

    async def run() -> StreamResult:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server, new_session(1) as session:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            patience = asyncio.timeout(3600)
            return await stream_chat(session, url, "m", PROMPT, answer_timeout_s=1.0, patience=patience)

    result = asyncio.run(asyncio.wait_for(run(), DEADLINE_S))
    assert (outcome_of(result), result.error, result.has_left) == ("failed", "the answer did not end within 1 s", False)
    assert result.text.startswith("word"), "what came before is kept"
    assert result.ended_at_s - result.sent_at_s >= 1.0


def test_an_answer_may_take_as_long_as_its_tokens_do() -> None:
    assert longest_answer_s({"max_tokens": 128}) == 436
    assert longest_answer_s({"max_completion_tokens": 10}) == 200
    assert longest_answer_s({"temperature": 0.0}) == 3600


def test_a_large_chunk_is_put_together_from_its_parts() -> None:
    text = "ä" * (1 << 20)
    event = json.dumps({"choices": [{"delta": {"content": text}, "finish_reason": "stop"}]}).encode()
    assert ask(answer(b"data: " + event + b"\n\ndata: [DONE]\n\n")).text == text


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (answer(b'{"data": [{"id": "m"}]}'), None),
        (
            answer(b"", b"Location: https://elsewhere/v1/models", status=b"308 Permanent Redirect"),
            "redirects to https://elsewhere",
        ),
        (answer(b'{"data": []}'), "names no model"),
        (answer(b"[" * 60_000), "names no model"),
        (answer(b"\xff"), "names no model"),
        (answer(b"[]"), "names no model"),
    ],
)
def test_a_server_that_names_no_model_is_no_target(
    data: bytes, reason: str | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(data)
        writer.close()

    async def run() -> Target:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server, new_session(1) as session:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            return await find(session, url=url, admin_url=None, model=None, state_dir=tmp_path_factory.mktemp("none"))

    if reason is None:
        assert asyncio.run(run()).model == "m"
    else:
        with pytest.raises(TargetError, match=reason):
            asyncio.run(run())
