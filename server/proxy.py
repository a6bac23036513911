"""Proxy: one request to an engine and its answer back, with retries before the first byte and none after it.

It knows engines and bytes. It does not know what a completion is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from server.admission import RETRY_AFTER_S
from server.errors import ApiError, error_event
from server.fleet import Engine, Fleet
from server.metrics import Metrics
from server.sse import EventRelay

logger = logging.getLogger(__name__)

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_EVENT_STREAM = "text/event-stream"
_DEATH_WORDS = (b"EngineCore", b"EngineDead")
"""An engine whose core died answers 500 with the name of vLLM's exception; to a client that is no fault of its request."""
_CONNECTION_ERRORS = (aiohttp.ClientError, OSError, TimeoutError)


class StreamBroken(Exception):
    """The engine's answer ended before its time; the client has been told."""


class Exchange:
    """One client request on its way through the gateway: what is sent, and what became of it."""

    def __init__(self, method: str, path: str, body: bytes | None, request_id: str) -> None:
        self.method = method
        self.path = path
        self.body = body
        self.request_id = request_id
        self.status = 0
        """Of the answer; 0 until it has begun."""

    def upstream_headers(self) -> dict[str, str]:
        headers = {"X-Request-Id": self.request_id}
        if self.body is not None:
            headers["Content-Type"] = "application/json"
        return headers


class Proxy:
    """Relays exchanges over the fleet."""

    def __init__(self, fleet: Fleet, session: aiohttp.ClientSession, metrics: Metrics) -> None:
        self._fleet = fleet
        self._session = session
        self._metrics = metrics

    async def relay(self, exchange: Exchange, send: Send, *, on_first_byte: Callable[[], None]) -> None:
        """Answer the client; raises ApiError where nothing was sent yet, StreamBroken where the answer was cut short."""
        async with self._open(exchange) as (engine, response, body):
            exchange.status = response.status
            headers = _answer_headers(exchange, engine, response)
            if body is not None:
                headers.append((b"content-length", str(len(body)).encode()))
            await send({"type": "http.response.start", "status": response.status, "headers": headers})
            if body is not None:
                await send({"type": "http.response.body", "body": body})
            else:
                await self._stream(engine, response, send, on_first_byte)

    @asynccontextmanager
    async def _open(self, exchange: Exchange) -> AsyncIterator[tuple[Engine, aiohttp.ClientResponse, bytes | None]]:
        """An engine's answer: its head and, unless it is an event stream, its whole body.

        Every ready engine is tried once, and once more on a fresh connection where a pooled one turned out closed.
        """
        left: set[Engine] = set()
        stale: set[Engine] = set()
        while True:
            engine = self._fleet.choose(exclude=left)
            if engine is None:
                raise self._unavailable(left)
            with engine.request():
                try:
                    response, body = await self._attempt(engine, exchange)
                except _CONNECTION_ERRORS as error:
                    self._metrics.retries.labels(engine.id).inc()
                    if _is_stale(error) and engine not in stale:
                        stale.add(engine)
                        continue
                    logger.warning("request %s: engine %s failed: %r", exchange.request_id, engine.id, error)
                    # The kind alone: clients see the reason, and aiohttp's words name the private address.
                    engine.suspect(f"failed a request: {type(error).__name__}")
                    left.add(engine)
                    continue
                if response.status >= 500 and self._fleet.choose(exclude=left | {engine}) is not None:
                    self._metrics.retries.labels(engine.id).inc()
                    left.add(engine)
                    response.close()
                    continue
                if _tells_of_death(response, body):
                    logger.error("request %s: engine %s died: %r", exchange.request_id, engine.id, body)
                    engine.doubt()
                    raise _engine_died()
                try:
                    yield engine, response, body
                finally:
                    # Closing, not releasing: an unfinished answer must end the generation now.
                    if body is None:
                        response.close()
                return

    async def _attempt(self, engine: Engine, exchange: Exchange) -> tuple[aiohttp.ClientResponse, bytes | None]:
        response = await self._session.request(
            exchange.method,
            engine.client.base_url + exchange.path,
            data=exchange.body,
            headers=exchange.upstream_headers(),
            allow_redirects=False,
        )
        if response.content_type == _EVENT_STREAM:
            return response, None
        try:
            return response, await response.read()
        except BaseException:
            response.close()
            raise

    async def _stream(
        self, engine: Engine, response: aiohttp.ClientResponse, send: Send, on_first_byte: Callable[[], None]
    ) -> None:
        relay = EventRelay()
        problem = "the engine ended the stream early"
        is_first = True
        while not relay.has_failed:
            try:
                data = await response.content.readany()
            except _CONNECTION_ERRORS as error:
                problem = f"the engine stopped answering: {error!r}"
                engine.doubt()
                break
            if not data:
                break
            events = relay.feed(data)
            if events:
                if is_first:
                    on_first_byte()
                    is_first = False
                await send({"type": "http.response.body", "body": events, "more_body": True})
        if relay.is_done:
            await send({"type": "http.response.body", "body": relay.rest()})
            return
        last = b"" if relay.has_failed else error_event("the engine failed while generating; retry", code="engine_failed")
        await send({"type": "http.response.body", "body": last})
        raise StreamBroken("the engine reported an error" if relay.has_failed else problem)

    def _unavailable(self, left: set[Engine]) -> ApiError:
        reason = self._fleet.why_not_ready() or f"engines {sorted(engine.id for engine in left)} failed this request"
        return ApiError(503, f"no engine can take the request: {reason}", code="no_engine_ready", retry_after_s=RETRY_AFTER_S)


def _answer_headers(exchange: Exchange, engine: Engine, response: aiohttp.ClientResponse) -> list[tuple[bytes, bytes]]:
    headers = [
        (b"content-type", response.headers.get("Content-Type", "application/json").encode("latin-1")),
        (b"x-request-id", exchange.request_id.encode()),
    ]
    for name, version in (
        (b"x-paceline-draft-version", engine.draft_version),
        (b"x-paceline-target-version", engine.target_version),
    ):
        if version is not None:
            headers.append((name, str(version).encode()))
    if response.status in (429, 503):
        headers.append((b"retry-after", response.headers.get("Retry-After", str(RETRY_AFTER_S)).encode("latin-1")))
    return headers


def _tells_of_death(response: aiohttp.ClientResponse, body: bytes | None) -> bool:
    return response.status >= 500 and body is not None and any(word in body for word in _DEATH_WORDS)


def _engine_died() -> ApiError:
    return ApiError(503, "the engine failed; retry shortly", code="engine_error", retry_after_s=RETRY_AFTER_S)


def _is_stale(error: Exception) -> bool:
    """The connection broke, rather than could not be made: it may have been an idle one the engine had just closed."""
    broke = isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError)
    return broke and not isinstance(error, aiohttp.ClientConnectorError)


async def until_disconnected(work: Awaitable[None], disconnected: Awaitable[None]) -> bool:
    """Run `work`, but no longer than the client stays; False when the client left first."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(disconnected)
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return False
        await working
        return True
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
