"""The gateway's route for rollouts, as a client: token ids out, an `Answer` filled as its stream arrives."""

from __future__ import annotations

import re
from collections.abc import Mapping

import aiohttp
import msgspec
from aiohttp.http_exceptions import LineTooLong
from msgspec import Struct

from rl.generator.answer import Answer, BadAnswer, StreamFailed

GENERATE_PATH = "/inference/v1/generate"
METRICS_PATH = "/metrics"
TENANT = "rollouts"
"""Keeps KV, quotas and metrics of rollouts apart from users'."""
_CONNECT_S = 10.0
_MAX_ERROR_BYTES = 1 << 16
_NO_LABEL, _MAX_LABEL_CHARS = re.compile(r"[^A-Za-z0-9._:-]"), 64
_TRY_AGAIN = {408, 409, 425, 429}
"""Besides every 5xx but _UNABLE."""
_UNABLE = 501


class Lost(Exception):
    """No whole answer: what the `Answer` holds by then may be used, and the rest asked for again."""

    def __init__(self, reason: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class Refused(Exception):
    """The gateway will never take this request."""


class Unable(Refused):
    """Nor any other: its engines are started with what breaks training."""


class Sampling(Struct, frozen=True, kw_only=True):
    max_tokens: int
    temperature: float
    seed: int
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int = 0
    """The drawn token's own and no others."""


class GenerateRequest(Struct, frozen=True, kw_only=True):
    token_ids: tuple[int, ...]
    sampling_params: Sampling
    cache_salt: str
    priority: int
    stream: bool = True


class _Problem(Struct, frozen=True):
    message: str = ""


class _Refusal(Struct):
    error: _Problem = _Problem()


class Gateway:
    """One HTTP session; `close` ends it."""

    def __init__(self, base_url: str, *, silence_s: float) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=silence_s)
        # As many connections as rollouts: what bounds them is the generator's concurrency.
        self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        self._base_url = base_url.rstrip("/")

    async def close(self) -> None:
        await self._session.close()

    async def stream(self, request: GenerateRequest, answer: Answer, *, domain: str) -> None:
        """Fill `answer` to its end. Raises Lost, Refused (Unable where no request would be taken) or BadAnswer."""
        try:
            async with self._post(request, domain) as response:
                await _require_ok(response)
                answer.begun_with = _version(response.headers, "X-Paceline-Target-Version")
                answer.draft_version = _version(response.headers, "X-Paceline-Draft-Version")
                await _read_events(response, answer)
        except (aiohttp.ClientError, TimeoutError, OSError, StreamFailed) as error:
            if answer.finish_reason is None:
                raise Lost(f"{type(error).__name__}: {error}") from error
        if answer.finish_reason is None:
            raise Lost("the stream ended before its answer did")

    async def ask(self, request: GenerateRequest) -> bytes:
        """A whole answer's body. Raises Lost or Refused."""
        try:
            async with self._post(request, TENANT) as response:
                await _require_ok(response)
                return await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Lost(f"{type(error).__name__}: {error}") from error

    async def metrics(self) -> str:
        """The page of metrics, the engines' included. Raises Lost or Refused."""
        try:
            async with self._session.get(self._base_url + METRICS_PATH) as response:
                await _require_ok(response)
                return (await response.read()).decode(errors="replace")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Lost(f"{type(error).__name__}: {error}") from error

    def _post(self, request: GenerateRequest, domain: str) -> aiohttp.client._RequestContextManager:
        label = _NO_LABEL.sub("_", domain)[:_MAX_LABEL_CHARS] or TENANT
        headers = {"Content-Type": "application/json", "X-Paceline-Tenant": TENANT, "X-Paceline-Domain": label}
        return self._session.post(self._base_url + GENERATE_PATH, data=msgspec.json.encode(request), headers=headers)


async def _require_ok(response: aiohttp.ClientResponse) -> None:
    if response.status == 200:
        return
    body = await response.content.read(_MAX_ERROR_BYTES)
    try:
        message = msgspec.json.decode(body, type=_Refusal).error.message
    except msgspec.DecodeError:
        message = ""
    reason = f"{response.status}: {message or body[:200]!r}"
    if response.status == _UNABLE:
        raise Unable(reason)
    if response.status >= 500 or response.status in _TRY_AGAIN:
        after = response.headers.get("Retry-After", "")
        raise Lost(reason, retry_after_s=float(after) if after.isdecimal() else None)
    raise Refused(reason)


async def _read_events(response: aiohttp.ClientResponse, answer: Answer) -> None:
    """Returns at the answer's end; usage that follows is read so that the connection can be used again."""
    try:
        async for line in response.content:
            data = line.strip()
            # A line without its end was cut off with the connection.
            if data.startswith(b"data:") and data != b"data: [DONE]" and line.endswith(b"\n"):
                answer.take(data[5:])
    except (ValueError, LineTooLong) as error:  # the one or the other for a line without end, as aiohttp's version is
        raise BadAnswer(f"the stream is none of events: {error}") from error


def _version(headers: Mapping[str, str], name: str) -> int | None:
    text = headers.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() else None
