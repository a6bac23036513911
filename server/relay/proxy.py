"""Proxy: one exchange, from the first engine asked to the last byte sent.

Until the first byte a request is moved to another engine whenever one fails it; after that, only a stream that can be gone on
with is (`stream`). It knows engines and bytes. It does not know which engine is best (`routing`) or what a completion is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from starlette.types import Send

from server.errors import ApiError, error_event, in_openai_shape
from server.fleet import Engine, EngineLost, Fleet
from server.metrics import Metrics
from server.relay.exchange import Client, Exchange, Head, Leg, Trip, engine_died, tells_of_death
from server.relay.join import CannotResume
from server.relay.legs import Answer, Legs
from server.relay.prefill import CONNECTION_ERRORS, is_silence, is_unreached, why_suspect
from server.relay.sse import EventRelay, is_engines_fault, reports_death
from server.relay.stream import Stream, read_cached_tokens
from server.routing.tokens import Prompt
from wire.control import AnswerLimits

if TYPE_CHECKING:
    from server.routing.router import Route, Router
    from server.routing.tokens import Prompts

logger = logging.getLogger(__name__)

RESUME_WAIT_S = 5.0
"""How long a broken stream waits for an engine that can go on with it; before the first byte a client can retry by itself."""
RESUME_POLL_S = 0.05


class StreamBroken(Exception):
    """The engine's answer ended before its time; the client has been told."""


@dataclass(frozen=True, slots=True)
class _Loss:
    """An engine's answer that broke off."""

    reason: str
    event: bytes = b""
    """The engine's own error event, where it sent one."""
    can_move: bool = True
    """False where the request, not the engine, is at fault."""


class Proxy:
    """Relays exchanges over the fleet."""

    def __init__(
        self,
        fleet: Fleet,
        metrics: Metrics,
        *,
        prompts: Prompts | None,
        router: Router,
        legs: Legs,
        open_stream: Callable[[Exchange], Stream],
        max_moves: int,
    ) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._prompts = prompts
        self._router = router
        self._legs = legs
        self._open_stream = open_stream
        self._max_moves = max_moves

    async def relay(self, exchange: Exchange, send: Send, *, on_first_byte: Callable[[], None]) -> None:
        """Answer the client; raises ApiError where nothing was sent yet, StreamBroken where the answer was cut short."""
        client = Client(exchange, send, on_first_byte)
        stream = self._open_stream(exchange)
        try:
            await self._run(exchange, stream, client)
        except ApiError as error:
            if not client.has_begun:
                raise
            await self._break_off(client, b"", f"{error}")

    async def _run(self, exchange: Exchange, stream: Stream, client: Client) -> None:
        trip = Trip(self._max_moves)
        prompt = None
        if exchange.fields is not None:
            if self._prompts is None:
                prompt = Prompt(session=exchange.session, reason="one_engine")
            else:
                prompt = await self._prompts.read(exchange.path, exchange.fields, exchange.session)
        while True:
            if prompt is not None and stream.leg.token_ids is not None:
                prompt = replace(prompt, token_ids=stream.leg.token_ids)
            async with self._open(exchange, stream.leg, trip, prompt) as answer:
                if answer.body is not None:
                    await self._send_whole(exchange, answer, answer.body, client)
                    return
                loss = await self._pump(exchange, answer, stream, client)
                if loss is None:
                    answer.head.engine.breaker.succeed(answer.visit)
                    self._legs.judge(answer, stream.num_cached_tokens)
                    return
            if not await self._turn(exchange, loss, answer.head, trip, stream, client):
                return

    async def _send_whole(self, exchange: Exchange, answer: Answer, body: bytes, client: Client) -> None:
        if client.has_begun:
            logger.error("request %s: engine %s did not go on: %r", exchange.request_id, answer.head.engine.id, body[:500])
            raise ApiError(502, "another engine did not go on with the answer", code="engine_failed")
        if answer.head.status < 500:
            answer.head.engine.breaker.succeed(answer.visit)
        head = answer.head
        if head.status >= 400:
            head, body = replace(head, content_type="application/json"), in_openai_shape(head.status, body)
        await client.answer(head.status, head.headers(exchange.request_id), body)
        self._legs.judge(answer, read_cached_tokens(body))

    async def _turn(self, exchange: Exchange, loss: _Loss, head: Head, trip: Trip, stream: Stream, client: Client) -> bool:
        """Turn the stream to another engine, False where none is needed; raises where it cannot go on."""
        engine = head.engine
        if not loss.can_move:
            if not client.has_begun:
                await client.stream(b"", head.status, lambda: head.headers(exchange.request_id))
            await self._break_off(client, loss.event, loss.reason)
        may_move = trip.lose(engine)
        if not client.has_begun:
            self._metrics.retries.labels(engine.id).inc()
            if not may_move:
                raise engine_died()
            stream.restart()
            return True
        closing = stream.closing()
        if closing:
            await client.end(closing)
            return False
        try:
            if not may_move:
                raise CannotResume("the request has lost as many engines as it may")
            status = engine.status
            stream.go_on(
                max_model_len=status.kv.max_model_len if status is not None else 0,
                limits=status.answer_limits if status is not None else AnswerLimits(),
                target_version=engine.target_version,
            )
        except CannotResume as error:
            await self._break_off(client, loss.event, f"{loss.reason}; {error}")
        logger.warning("request %s leaves engine %s: %s", exchange.request_id, engine.id, loss.reason)
        self._metrics.moves.labels(engine.id).inc()
        return True

    async def _break_off(self, client: Client, event: bytes, reason: str) -> None:
        await client.end(event or error_event("the engine failed while generating; retry", code="engine_failed"))
        raise StreamBroken(reason)

    @asynccontextmanager
    async def _open(self, exchange: Exchange, leg: Leg, trip: Trip, prompt: Prompt | None) -> AsyncIterator[Answer]:
        """The answer of an engine that took the request; every engine is tried once."""
        while True:
            route, engine = await self._choose(exchange, leg, trip, prompt)
            with ExitStack() as stack:
                visit = stack.enter_context(engine.request())
                try:
                    answer = await engine.unless_lost(self._legs.ask(exchange, leg, route, engine, visit, trip, stack))
                except CONNECTION_ERRORS as error:
                    if is_silence(error):
                        engine.wake.set()
                        raise _too_slow() from error
                    self._metrics.retries.labels(engine.id).inc()
                    logger.warning("request %s: engine %s failed: %r", exchange.request_id, engine.id, error)
                    engine.suspect(why_suspect(error, "request"), visit)
                    if is_unreached(error):
                        trip.leave(engine)
                    elif not trip.lose(engine):
                        raise engine_died() from None
                    continue
                try:
                    if self._is_passed_by(answer, trip):
                        continue
                    if answer.body is None and answer.response is not None:
                        break_off = partial(answer.response.content.set_exception, EngineLost())
                        stack.enter_context(engine.told_when_lost(break_off))
                    yield answer
                finally:
                    # Closing, not releasing: an unfinished answer must end the generation now.
                    if answer.response is not None:
                        answer.response.close()
                return

    def _is_passed_by(self, answer: Answer, trip: Trip) -> bool:
        """Whether another engine is asked instead of passing this answer on; raises where the engine died with the request."""
        head = answer.head
        is_dead = tells_of_death(head.status, answer.body)
        if head.status < 500 and not is_dead:
            return False
        if is_dead:
            logger.error("engine %s died: %r", head.engine.id, (answer.body or b"")[:500])
            head.engine.doubt(answer.visit)
        may_move = trip.lose(head.engine) if is_dead else True
        if may_move and self._fleet.choose(exclude=trip.excluded() | {head.engine}) is not None:
            self._metrics.retries.labels(head.engine.id).inc()
            trip.leave(head.engine)
            return True
        if is_dead:
            raise engine_died()
        return False

    async def _choose(self, exchange: Exchange, leg: Leg, trip: Trip, prompt: Prompt | None) -> tuple[Route | None, Engine]:
        deadline_s = time.monotonic() + (RESUME_WAIT_S if leg.token_ids is not None else 0.0)
        while True:
            excluded = trip.excluded()
            if leg.target_version is not None:
                excluded |= {engine for engine in self._fleet.engines if engine.target_version != leg.target_version}
            if prompt is None:
                engine = self._fleet.choose(exclude=excluded)
                if engine is not None:
                    return None, engine
            else:
                route = self._router.choose(prompt, exclude=excluded, request_id=exchange.request_id)
                if route is not None:
                    return route, route.engine
            if time.monotonic() >= deadline_s:
                raise self._unavailable(excluded)
            await asyncio.sleep(RESUME_POLL_S)

    async def _pump(self, exchange: Exchange, answer: Answer, stream: Stream, client: Client) -> _Loss | None:
        """Pass a stream's events on; returns what broke it, or None when it ended well."""
        assert answer.response is not None
        relay = EventRelay()
        engine = answer.head.engine
        while not relay.has_failed:
            try:
                data = await answer.response.content.readany()
            except CONNECTION_ERRORS as error:
                if relay.is_done:
                    break
                if is_silence(error):
                    engine.wake.set()
                    if not client.has_begun:
                        raise _too_slow() from error
                else:
                    engine.doubt(answer.visit)
                return _Loss(f"the engine stopped answering: {error!r}")
            if not data:
                break
            try:
                events = stream.take(relay.feed(data))
            except CannotResume as error:
                return _Loss(str(error), can_move=False)
            if events:
                self._legs.note_arrival(answer)
                await client.stream(events, answer.head.status, lambda: answer.head.headers(exchange.request_id))
        if relay.is_done:
            await client.end(relay.rest())
            return None
        if relay.is_too_long:
            return _Loss("an event of the answer is too long to pass on", can_move=False)
        if not relay.error:
            engine.doubt(answer.visit)
            return _Loss("the engine gave the answer up" if relay.is_aborted else "the engine ended the stream early")
        if reports_death(relay.error):
            engine.doubt(answer.visit)
        return _Loss("the engine reported an error", relay.error, can_move=is_engines_fault(relay.error))

    def _unavailable(self, excluded: set[Engine]) -> ApiError:
        reason = self._fleet.why_not_ready() or f"engines {sorted(engine.id for engine in excluded)} failed this request"
        after_s = self._fleet.retry_after_s(excluded)
        return ApiError(503, f"no engine can take the request: {reason}", code="no_engine_ready", retry_after_s=after_s)


def _too_slow() -> ApiError:
    return ApiError(504, "the engine took too long; ask for less at once, or for a stream", code="engine_timeout")


async def first_to_end(work: Awaitable[None], *ends: Awaitable[object]) -> int:
    """Run `work` until it or one of `ends` is done, and cancel the rest; returns which one it was, 0 for `work`.

    `work` runs in the caller's task: one of its own would begin a turn of the event loop later, behind others' chunks.
    """
    task = asyncio.current_task()
    assert task is not None
    num_cancels = task.cancelling()
    first = 0
    is_over = False

    def end(index: int, _: asyncio.Future[object]) -> None:
        nonlocal first
        if not first and not is_over:
            first = index
            task.cancel()

    watches = [asyncio.ensure_future(one) for one in ends]
    for index, watch in enumerate(watches, 1):
        watch.add_done_callback(partial(end, index))
    try:
        await work
        return 0
    except asyncio.CancelledError:
        if not first or task.cancelling() > num_cancels + 1:
            # Somebody else wants the caller to end, too.
            raise
        watches[first - 1].result()
        return first
    finally:
        is_over = True
        if first:
            task.uncancel()
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
