"""A streaming client that notes when every chunk came and whether the answer is whole."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from loadtest.chunks import DONE, Chunk, decode
from loadtest.traffic import Prompt

ERROR_FIELDS = frozenset({"message", "type", "param", "code"})
"""Of an error in OpenAI's shape."""
_JSON = {"Content-Type": "application/json"}
_KEEP_ALIVE_S = 2.0
"""Well below the 5 s after which uvicorn closes an idle connection: a request sent at that moment would be lost."""
_SILENCE_S = 180.0
"""Without a byte."""
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=_SILENCE_S)
SLOWEST_TOKEN_S = 2.0
_UNBOUNDED_S = 3600.0
"""Of an answer that may have any number of tokens."""
_LENGTH_KEYS = ("max_tokens", "max_completion_tokens")
_STREAM_FIELDS = (b"data:", b"event:", b"id:", b"retry:", b":")
"""What a line of a stream of events begins with."""
MAX_EVENT_BYTES = 16 << 20
MAX_CHUNKS = 1 << 19
"""Of one answer; one that brings half a million does not end. Its line in `requests.jsonl` stays below `lines.MAX_LINE_BYTES`."""
_MAX_REASON_BYTES = 1 << 16
"""Read of an answer that is no stream: what follows does not say better what is wrong."""
_MAX_ERROR_CHARACTERS = 500
"""Kept of an error: every request of a run may have one."""


class AnswerError(Exception):
    """An answer of status 200 that is none."""


@dataclass
class StreamResult:
    """One request as its client saw it. Times are of the monotonic clock, seconds."""

    prompt_id: str
    sent_at_s: float
    status: int | None = None
    chunk_times_s: list[float] = field(default_factory=list)
    """Arrivals of chunks that carried tokens."""
    chunk_token_counts: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    """Where `return_token_ids` was asked for."""
    text: str = ""
    num_completion_tokens: int | None = None
    """As the server counts them."""
    finish_reason: str | None = None
    is_complete: bool = False
    """The stream was ended by its end mark."""
    error: str | None = None
    error_bodies: list[Any] = field(default_factory=list)
    """What the server gave under `error`, in its answer or in its stream, once for each time."""
    first_event_at_s: float | None = None
    """Arrival of the first event of the stream."""
    num_cached_tokens: int | None = None
    """Prompt tokens not computed afresh, where the server says so."""
    num_prompt_tokens: int | None = None
    accepted_per_step: list[int] | None = None
    """Proposals accepted in each verify step, where the engine tells them per request."""
    drafted_per_step: list[int] | None = None
    """Proposals made for each of these steps."""
    num_spec_tokens: int | None = None
    """K, the most proposals that the engine makes for a step."""
    draft_version: str | None = None
    target_version: str | None = None
    kv_path: str | None = None
    request_id: str | None = None
    ended_at_s: float = 0.0
    silent_end_at_s: float | None = None
    """Arrival of an end without text, for as long as it is not known whether it carried a token."""
    has_left: bool = False
    """The client closed the connection before the answer was whole."""

    @property
    def is_ok(self) -> bool:
        """Answered, whole and without an error chunk."""
        return self.status == 200 and self.error is None and self.is_complete and self.finish_reason is not None

    @property
    def is_truncated(self) -> bool:
        """The answer began, and ended neither by its end mark nor by an error that says why, nor by its client."""
        is_whole = self.is_complete and self.finish_reason is not None
        return self.status == 200 and self.error is None and not is_whole and not self.has_left

    @property
    def has_one_openai_error(self) -> bool:
        """It failed as a client can handle it: with one error, in OpenAI's shape, and no end mark that looks like success."""
        shapes = [set(body) if isinstance(body, dict) else set() for body in self.error_bodies]
        return shapes == [set(ERROR_FIELDS)] and not self.is_complete

    @property
    def first_byte_s(self) -> float | None:
        """Seconds from sending the request to the first event of its stream."""
        return None if self.first_event_at_s is None else self.first_event_at_s - self.sent_at_s

    @property
    def num_tokens(self) -> int:
        return self.num_completion_tokens if self.num_completion_tokens is not None else sum(self.chunk_token_counts)


def new_session(concurrency: int | None) -> aiohttp.ClientSession:
    """A session that neither queues nor pools less than `concurrency` connections (None: any number), and trusts no proxy."""
    limit = 0 if concurrency is None else max(concurrency * 2, 16)
    connector = aiohttp.TCPConnector(limit=limit, keepalive_timeout=_KEEP_ALIVE_S)
    return aiohttp.ClientSession(connector=connector, timeout=_TIMEOUT, trust_env=False)


async def stream_chat(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    prompt: Prompt,
    *,
    options: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
    patience: asyncio.Timeout | None = None,
    answer_timeout_s: float | None = None,
) -> StreamResult:
    """Send one chat request and read its stream to the end. Failures are noted in the result, not raised.

    An answer that has no end after `answer_timeout_s`, by default `longest_answer_s`, is given up and has failed.
    Where `patience` runs out the client leaves, and the result says so.
    """
    body = msgspec.json.encode(
        {
            "model": model,
            "messages": prompt.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **(options or {}),
        }
    )
    limit_s = longest_answer_s(options or {}) if answer_timeout_s is None else answer_timeout_s
    limit = asyncio.timeout(limit_s)
    result = StreamResult(prompt_id=prompt.id, sent_at_s=time.monotonic())
    try:
        async with patience or asyncio.timeout(None), limit:
            await _exchange(session, f"{url}/v1/chat/completions", body, {**_JSON, **(headers or {})}, result)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        if patience is not None and patience.expired():
            result.has_left = True
        elif limit.expired():
            result.error = f"the answer did not end within {limit_s:g} s"
        else:
            result.error = f"{type(error).__name__}: {error}"
    except AnswerError as error:
        result.error = str(error)
    result.ended_at_s = time.monotonic()
    if result.error is not None:
        result.error = _as_text(result.error)[:_MAX_ERROR_CHARACTERS]
    return result


def longest_answer_s(options: Mapping[str, Any]) -> float:
    """How long a request with these fields may take, seconds: as long as a server may be silent, and `SLOWEST_TOKEN_S` for each token
    it may have. Bytes that come again and again keep an answer from being silent for ever."""
    bounds: list[int] = [options[key] for key in _LENGTH_KEYS if isinstance(options.get(key), int)]
    return _SILENCE_S + SLOWEST_TOKEN_S * max(bounds) if bounds else _UNBOUNDED_S


async def _exchange(
    session: aiohttp.ClientSession, url: str, body: bytes, headers: Mapping[str, str], result: StreamResult
) -> None:
    # A redirect is not followed: what is measured is the address that was given, and each request would be sent twice.
    async with session.post(url, data=body, headers=headers, allow_redirects=False) as response:
        result.status = response.status
        result.draft_version = _header(response, "X-Paceline-Draft-Version")
        result.target_version = _header(response, "X-Paceline-Target-Version")
        result.kv_path = _header(response, "X-Paceline-Kv-Path")
        result.request_id = _header(response, "X-Request-Id")
        if response.status != 200:
            text = (await read_at_most(response.content, _MAX_REASON_BYTES)).decode(errors="replace")
            refuse(result, f"redirected to {response.headers['Location']}" if "Location" in response.headers else text)
            return
        async for data in events(response.content):
            note(result, data, time.monotonic())
            if len(result.chunk_times_s) > MAX_CHUNKS:
                raise AnswerError(f"the answer does not end: it has brought more than {MAX_CHUNKS} chunks")


def _header(response: aiohttp.ClientResponse, name: str) -> str | None:
    value = response.headers.get(name)
    return None if value is None else _as_text(value)


def _as_text(value: str) -> str:
    """aiohttp keeps bytes that are no UTF-8 as lone surrogates, which no file takes."""
    return value.encode(errors="surrogatepass").decode(errors="replace")


async def read_at_most(content: aiohttp.StreamReader, num_bytes: int) -> bytes:
    """The beginning of a body, which may have no end."""
    data = bytearray()
    while len(data) < num_bytes and (more := await content.read(num_bytes - len(data))):
        data += more
    return bytes(data)


def refuse(result: StreamResult, text: str) -> None:
    """Enter an answer that is not 200 into the result."""
    result.error = text or f"status {result.status} without a reason"
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return
    if isinstance(body, dict) and "error" in body:
        result.error_bodies.append(body["error"])


async def events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of each server-sent event; raises AnswerError of an endless one, and of a body that holds something else."""
    rest: list[bytes] = []
    num_held = 0
    has_begun = False
    other = b""
    # Whole reads, split here: aiohttp's own lines cost the client as much as the chunks themselves.
    async for data in content.iter_any():
        rest.append(data)
        if b"\n" not in data:
            num_held += len(data)
            if num_held > MAX_EVENT_BYTES:
                raise AnswerError(f"one line of the answer is longer than {MAX_EVENT_BYTES} bytes")
            continue
        *lines, last = b"".join(rest).split(b"\n")
        rest, num_held = [last], len(last)
        for line in lines:
            if line.startswith(b"data:"):
                has_begun = True
                yield line[5:].strip()
            elif not has_begun and not line.startswith(_STREAM_FIELDS):
                other = (other + line)[:_MAX_REASON_BYTES]
    last = b"".join(rest)
    if last.startswith(b"data:"):
        yield last[5:].strip()
    elif not has_begun and (other := (other + last).strip()) and not other.startswith(_STREAM_FIELDS):
        raise AnswerError(f"the answer is no stream of events: {other.decode(errors='replace')}")


def note(result: StreamResult, data: bytes, now_s: float) -> None:
    """Enter one event into the result."""
    if result.first_event_at_s is None:
        result.first_event_at_s = now_s
    if data == DONE:
        result.is_complete = True
        return
    try:
        chunk = decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        text = data[:200].decode(errors="replace")
        result.error = f"a chunk is not JSON of a chat completion ({error}): {text}"
        return
    if chunk.error is not None:
        problem = chunk.error
        result.error_bodies.append(problem)
        result.error = str(problem.get("message", problem) if isinstance(problem, dict) else problem)
        return
    _note_tokens(result, chunk, now_s)
    if chunk.usage is not None:
        result.num_prompt_tokens = chunk.usage.prompt_tokens
        result.num_completion_tokens = chunk.usage.completion_tokens
        result.num_cached_tokens = chunk.usage.num_cached_tokens
        _settle_silent_end(result)
    if chunk.speculation is not None:
        result.accepted_per_step = chunk.speculation.per_step_accepted
        result.drafted_per_step = chunk.speculation.per_step_drafted
        result.num_spec_tokens = chunk.speculation.num_spec_tokens


def _note_tokens(result: StreamResult, chunk: Chunk, now_s: float) -> None:
    """Enter what the choices of one event carry."""
    for choice in chunk.choices or ():
        token_ids = choice.token_ids or []
        if token_ids or (choice.delta is not None and choice.delta.has_tokens) or _has_grown(result, chunk):
            result.text += (choice.delta and choice.delta.content) or ""
            result.token_ids += token_ids
            result.chunk_times_s.append(now_s)
            result.chunk_token_counts.append(len(token_ids) or _num_new_tokens(result, chunk))
        elif choice.finish_reason:
            result.silent_end_at_s = now_s
        result.finish_reason = choice.finish_reason or result.finish_reason


def _has_grown(result: StreamResult, chunk: Chunk) -> bool:
    """Whether the server's running count, where it keeps one, tells of tokens that have no text."""
    known = result.num_completion_tokens
    return chunk.usage is not None and known is not None and chunk.usage.completion_tokens > known


def _settle_silent_end(result: StreamResult) -> None:
    """An end without text carried a token if the server counts more than came before: vLLM's end token has none."""
    if result.silent_end_at_s is not None and (result.num_completion_tokens or 0) > sum(result.chunk_token_counts):
        result.chunk_times_s.append(result.silent_end_at_s)
        result.chunk_token_counts.append(1)
    result.silent_end_at_s = None


def _num_new_tokens(result: StreamResult, chunk: Chunk) -> int:
    """Tokens of a chunk that brings no ids: by the running count where the server keeps one, else taken for one."""
    if chunk.usage is None:
        return 1
    return max(chunk.usage.completion_tokens - (result.num_completion_tokens or 0), 1)
