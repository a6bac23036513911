"""Legs: asks one engine, with a prefill leg on another before it where the route has one.

Which engine, and what to do when it fails, is the proxy's business.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import aiohttp

from server.errors import error_body
from server.fleet import Engine
from server.metrics import Metrics
from server.paths import GENERATE_PATH
from server.relay.breaker import Visit
from server.relay.exchange import (
    FULL_REPORT,
    Exchange,
    Head,
    Leg,
    Trip,
    engine_died,
    salted_for,
    tells_of_death,
    with_xargs,
)
from server.relay.prefill import CONNECTION_ERRORS, CannotHandOver, Lease, PrefillFailed, PrefillLegs, PrefillRefused

if TYPE_CHECKING:
    from server.routing.router import Route, Router

logger = logging.getLogger(__name__)

_EVENT_STREAM = "text/event-stream"
_JSON = "application/json"


@dataclass(slots=True)
class Answer:
    """One engine's answer: its head and, unless it is an event stream, its whole body."""

    head: Head
    body: bytes | None
    response: aiohttp.ClientResponse | None
    route: Route | None
    lease: Lease | None
    visit: Visit
    """At the engine that was to answer."""
    started_s: float
    has_arrived: bool = False
    """Its first byte is here, so the engine has the prompt's KV."""


class Legs:
    """Asks engines."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        metrics: Metrics,
        *,
        router: Router,
        prefills: PrefillLegs,
        wants_full_report: Callable[[Engine], bool],
    ) -> None:
        """`wants_full_report` says of which engines requests should have the cached blocks they reuse told."""
        self._session = session
        self._metrics = metrics
        self._router = router
        self._prefills = prefills
        self._wants_full_report = wants_full_report

    async def ask(
        self, exchange: Exchange, leg: Leg, route: Route | None, engine: Engine, visit: Visit, trip: Trip, stack: ExitStack
    ) -> Answer:
        """Both legs, or the one there is. What ends with the answer is entered into `stack`: a lease, what the route expects.

        Raises ApiError where the prefill engine was the last one that the request may lose.
        """
        started_s = time.monotonic()
        if route is not None:
            stack.callback(self._router.forget, route)
        path = route.path if route is not None else ""
        lease = None
        if route is not None and route.prefill is not None:
            try:
                lease = await self._prefills.run(exchange, leg, route.prefill, engine)
                stack.enter_context(self._prefills.held(lease, engine))
                self._router.observe_prefill(route, time.monotonic() - started_s)
            except PrefillRefused as refusal:
                head = Head(route.prefill, path, refusal.status, refusal.content_type)
                return Answer(head, refusal.body, None, route, None, visit, started_s)
            except PrefillFailed as failure:
                if not isinstance(failure, CannotHandOver):
                    logger.warning("request %s: %s; engine %s computes the prompt", exchange.request_id, failure, engine.id)
                    self._metrics.prefill_failures.labels(route.prefill.id).inc()
                if failure.is_death and not trip.lose(route.prefill):
                    raise engine_died() from failure
                route = self._router.degrade(route, str(failure))
                stack.callback(self._router.forget, route)
                path = route.path
                # What the other engine took is not this one's time.
                started_s = time.monotonic()
        response = await self._send(exchange, leg, engine, lease)
        head = _read_head(response, engine, path)
        answer = Answer(head, None, response, route, lease, visit, started_s)
        if response.content_type != _EVENT_STREAM or response.status != 200:
            try:
                answer.body = await response.read()
            except BaseException:
                response.close()
                raise
            if problem := _why_no_answer(response):
                logger.error("request %s: engine %s answered %s", exchange.request_id, engine.id, problem)
                answer.head = replace(head, status=502)
                answer.body = error_body(502, f"the engine answered {problem}", code="engine_failed")
            if not tells_of_death(answer.head.status, answer.body):
                self.note_arrival(answer)
        return answer

    async def _send(self, exchange: Exchange, leg: Leg, engine: Engine, lease: Lease | None) -> aiohttp.ClientResponse:
        """The head of an engine's answer, on a fresh connection where a pooled one turned out closed."""
        method, url, headers = exchange.method, engine.client.base_url + leg.path, exchange.upstream_headers()
        changes = {} if lease is None else {"kv_transfer_params": lease.params}
        if leg.path == GENERATE_PATH and leg.fields is not None:
            changes["cache_salt"] = salted_for(leg.fields, engine)
        elif leg.fields is not None and self._wants_full_report(engine):
            changes["vllm_xargs"] = with_xargs(leg.fields, FULL_REPORT)
        body = leg.body(**changes)
        try:
            return await self._session.request(method, url, data=body, headers=headers, allow_redirects=False)
        except CONNECTION_ERRORS as error:
            # With a lease not even the same engine is asked twice: it may have pulled the blocks before it broke off.
            if lease is not None or not _is_stale(error):
                raise
            self._metrics.retries.labels(engine.id).inc()
            try:
                return await self._session.request(method, url, data=body, headers=headers, allow_redirects=False)
            except aiohttp.ClientConnectorError as refused:
                # It had the request a moment ago and may have died of it.
                raise aiohttp.ServerDisconnectedError from refused

    def note_arrival(self, answer: Answer) -> None:
        """An answer has begun; it begins once."""
        if answer.has_arrived:
            return
        answer.has_arrived = True
        # A refusal pulls nothing. vLLM releases the lease where its handler refuses, not where the body is refused before.
        if answer.lease is not None and answer.head.status == 200:
            answer.lease.pull()
        if answer.route is not None:
            is_whole = answer.body is not None
            self._router.observe(answer.route, first_byte_s=None if is_whole else time.monotonic() - answer.started_s)

    def judge(self, answer: Answer, num_cached_tokens: int | None) -> None:
        """An answer is complete, and told so many cached prompt tokens, or none."""
        if answer.route is not None and num_cached_tokens is not None:
            self._router.judge(answer.route, num_cached_tokens)


def _read_head(response: aiohttp.ClientResponse, engine: Engine, kv_path: str) -> Head:
    """Raises ClientPayloadError where a header that the client gets cannot be sent on."""
    content_type = response.headers.get("Content-Type", "application/json")
    retry_after = response.headers.get("Retry-After")
    if not content_type.isascii() or (retry_after is not None and not retry_after.isascii()):
        response.close()
        raise aiohttp.ClientPayloadError("a header of the answer is not ASCII")
    return Head(engine, kv_path, response.status, content_type, retry_after)


def _why_no_answer(response: aiohttp.ClientResponse) -> str:
    """What is wrong with a whole answer that is neither JSON nor an error; no engine means it. Empty where nothing is."""
    if response.status >= 400 or (response.status == 200 and response.content_type == _JSON):
        return ""
    return f"{response.status} with {response.content_type}"


def _is_stale(error: Exception) -> bool:
    """The connection broke, rather than could not be made: it may have been an idle one the engine had just closed."""
    broke = isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError)
    return broke and not isinstance(error, aiohttp.ClientConnectorError)
