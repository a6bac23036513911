"""A streaming client that notes when every chunk came and whether the answer is whole."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from loadtest.traffic import Prompt

DONE = "[DONE]"
ERROR_FIELDS = frozenset({"message", "type", "param", "code"})
"""Of an error in OpenAI's shape."""
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=180.0)


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
    draft_version: str | None = None
    request_id: str | None = None
    ended_at_s: float = 0.0

    @property
    def is_ok(self) -> bool:
        """Answered, whole and without an error chunk."""
        return self.status == 200 and self.error is None and self.is_complete and self.finish_reason is not None

    @property
    def is_truncated(self) -> bool:
        """The answer began, and ended neither by its end mark nor by an error that says why."""
        return self.status == 200 and self.error is None and not (self.is_complete and self.finish_reason is not None)

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


def new_session(concurrency: int) -> aiohttp.ClientSession:
    """A session that neither queues nor pools less than `concurrency` connections, and trusts no proxy."""
    connector = aiohttp.TCPConnector(limit=max(concurrency * 2, 16))
    return aiohttp.ClientSession(connector=connector, timeout=_TIMEOUT, trust_env=False)


async def stream_chat(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    prompt: Prompt,
    *,
    options: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
) -> StreamResult:
    """Send one chat request and read its stream to the end. Failures are noted in the result, not raised."""
    body = {
        "model": model,
        "messages": list(prompt.messages),
        "stream": True,
        "stream_options": {"include_usage": True},
        **(options or {}),
    }
    result = StreamResult(prompt_id=prompt.id, sent_at_s=time.monotonic())
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body, headers=dict(headers or {})) as response:
            result.status = response.status
            result.draft_version = response.headers.get("X-Paceline-Draft-Version")
            result.request_id = response.headers.get("X-Request-Id")
            if response.status != 200:
                refuse(result, await response.text())
            else:
                async for data in events(response.content):
                    note(result, data, time.monotonic())
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        result.error = f"{type(error).__name__}: {error}"
    result.ended_at_s = time.monotonic()
    return result


def refuse(result: StreamResult, text: str) -> None:
    """Enter an answer that is not 200 into the result."""
    result.error = text[:500] or f"status {result.status} without a reason"
    try:
        body = json.loads(text)
    except ValueError:
        return
    if isinstance(body, dict) and "error" in body:
        result.error_bodies.append(body["error"])


async def events(content: aiohttp.StreamReader) -> AsyncIterator[str]:
    """The data of each server-sent event."""
    rest = b""
    # Whole reads, split here: aiohttp's own lines cost the client as much as the chunks themselves.
    async for data in content.iter_any():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].decode("utf-8", errors="replace").strip()
    if rest.startswith(b"data:"):
        yield rest[5:].decode("utf-8", errors="replace").strip()


def note(result: StreamResult, data: str, now_s: float) -> None:
    """Enter one event into the result."""
    if result.first_event_at_s is None:
        result.first_event_at_s = now_s
    if data == DONE:
        result.is_complete = True
        return
    try:
        chunk = msgspec.json.decode(data)
    except msgspec.DecodeError:
        result.error = f"a chunk is not JSON: {data[:200]}"
        return
    if "error" in chunk:
        problem = chunk["error"]
        result.error_bodies.append(problem)
        result.error = str(problem.get("message", problem) if isinstance(problem, dict) else problem)
        return
    usage = chunk.get("usage")
    if usage:
        result.num_completion_tokens = int(usage["completion_tokens"])
        details = usage.get("prompt_tokens_details")
        result.num_cached_tokens = details.get("cached_tokens") if details else None
    for choice in chunk.get("choices", ()):
        text = (choice.get("delta") or {}).get("content") or ""
        token_ids = choice.get("token_ids") or []
        if text or token_ids:
            result.text += text
            result.token_ids += token_ids
            result.chunk_times_s.append(now_s)
            result.chunk_token_counts.append(len(token_ids) or 1)
        result.finish_reason = choice.get("finish_reason") or result.finish_reason
