"""The KV event channel: one SUB socket the gateway binds, one feed for each engine that connects to it.

A feed applies events strictly in order of their numbers. Where numbers are missing it asks the engine to repeat them;
what stays missing costs the engine's whole index, because a removal nobody heard of would be believed for ever. An engine tells
of a block only when it fills it, so what it holds by then would stay unknown for as long as it is reused: for a time, requests
have it tell of the blocks they reuse as well.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping
from contextlib import aclosing

import zmq
import zmq.asyncio

from server.routing.index import KvIndex
from server.routing.kv_messages import (
    TOPIC_PREFIX,
    AllBlocksCleared,
    BlockStored,
    KvEvent,
    decode_events,
    decode_number,
    engine_of,
)
from server.routing.metrics import RoutingMetrics
from server.routing.replay import ReplaySocket
from wire.errors import WireError

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
MAX_QUEUED_MESSAGES = 10_000
"""Messages waiting for one engine's feed, and for the socket; newer ones are lost and asked for again."""
MAX_REPLAY_ROUNDS = 16
"""An engine's replay socket may itself lose messages when it sends many at once; the rest is asked for again."""

REPORT_S = 600.0
"""How long requests have an engine tell what they reuse, after its index was lost and after each block that shows that something
is still missing. Conversations that come back within that time are known again."""

_HERE = (None, "GPU")
"""Memory the engine computes on: vLLM calls it GPU on every platform. Other media are slower tiers behind it, whose
blocks it does not report as cached before it has loaded them."""
_UNKNOWN_ENGINE = "unknown"


class KvListener:
    """Feeds the KV index from the engines' events."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        endpoint: str,
        replay_endpoints: Mapping[str, str],
        index: KvIndex,
        metrics: RoutingMetrics,
    ) -> None:
        """`replay_endpoints` has every engine's address by id; empty where it repeats nothing."""
        self._context = context
        self._endpoint = endpoint
        self._metrics = metrics
        self._feeds = {
            engine_id: EngineFeed(engine_id, ReplaySocket(context, address), index, metrics)
            for engine_id, address in replay_endpoints.items()
        }

    async def listen(self) -> None:
        """Receive for as long as the gateway runs."""
        with self._context.socket(zmq.SUB) as socket:
            socket.linger = 0
            socket.rcvhwm = MAX_QUEUED_MESSAGES
            socket.maxmsgsize = MAX_MESSAGE_BYTES
            socket.subscribe(TOPIC_PREFIX.encode())
            socket.bind(self._endpoint)
            async with asyncio.TaskGroup() as tasks:
                for feed in self._feeds.values():
                    tasks.create_task(feed.follow())
                while True:
                    self._take(await socket.recv_multipart())
                    await asyncio.sleep(0)  # A full socket never suspends, and requests must not wait for it.

    def engine_restarted(self, engine_id: str) -> None:
        """Another process answers under this id: what the old one held is gone, and numbers begin anew."""
        self._feeds[engine_id].restart()

    def engine_changed(self, engine_id: str) -> None:
        """The same process computes with another target: KV it told of so far counts no more, and numbers go on."""
        self._feeds[engine_id].skip()

    def wants_full_report(self, engine_id: str) -> bool:
        """Whether requests should have this engine tell of the blocks they reuse too."""
        return self._feeds[engine_id].wants_full_report

    def _take(self, frames: list[bytes]) -> None:
        feed = None
        try:
            if len(frames) != 3:
                raise WireError(f"{len(frames)} frames, expected topic, number and batch")
            feed = self._feeds.get(engine_of(frames[0]))
            if feed is None:
                raise WireError(f"no engine is configured for topic {frames[0][:80]!r}")
            feed.offer(decode_number(frames[1]), frames[2])
        except WireError as error:
            self._metrics.bad_events.labels(feed.engine_id if feed else _UNKNOWN_ENGINE).inc()
            logger.warning("unusable KV event message: %s", error)


class EngineFeed:
    """The ordered stream of one engine's events."""

    def __init__(self, engine_id: str, replay: ReplaySocket, index: KvIndex, metrics: RoutingMetrics) -> None:
        self.engine_id = engine_id
        self._replay = replay
        self._index = index
        self._metrics = metrics
        self._pending: deque[tuple[int, bytes]] = deque()
        self._wake = asyncio.Event()
        self._newest_number = -1
        """Of the live messages of this engine process."""
        self._next_number = 0
        """All before it are applied."""
        self._is_new = True
        """Everything has to be asked for."""
        self._has_lost = False
        """This engine process may hold blocks nobody will tell of unasked."""
        self._report_until_s = 0.0
        """Monotonic."""

    @property
    def wants_full_report(self) -> bool:
        return time.monotonic() < self._report_until_s

    def offer(self, number: int, payload: bytes) -> None:
        """Take one live message; their numbers only ever rise, but in another process."""
        if number <= self._newest_number:
            logger.info("KV events of engine %s begin anew", self.engine_id)
            self.restart()
        self._newest_number = number
        if len(self._pending) < MAX_QUEUED_MESSAGES:
            self._pending.append((number, payload))
        self._wake.set()

    def restart(self) -> None:
        self._pending.clear()
        self._newest_number = -1
        self._is_new = True
        self._has_lost, self._report_until_s = False, 0.0
        self._index.clear(self.engine_id)
        self._wake.set()

    def skip(self) -> None:
        """Leave out all that was told so far, whether it was applied or waits."""
        self._pending.clear()
        self._next_number = max(self._next_number, self._newest_number + 1)
        self._forget("its KV was computed by another target")

    async def follow(self) -> None:
        """Apply events for as long as the gateway runs."""
        while True:
            if self._is_new:
                self._is_new, self._next_number = False, 0
                self._index.clear(self.engine_id)
                await self._ask_again()
            while self._pending and not self._is_new:
                await self._advance(*self._pending.popleft())
                await asyncio.sleep(0)
            if not self._is_new:
                await self._wake.wait()
            self._wake.clear()

    async def _advance(self, number: int, payload: bytes) -> None:
        if number > self._next_number:
            self._metrics.gaps.labels(self.engine_id).inc()
            await self._ask_again()
            if self._is_new:
                return
        if number > self._next_number:
            self._lose_until(number)
        if number == self._next_number:
            self.apply(payload)

    async def _ask_again(self) -> None:
        """Have the engine repeat its events from the first missing one on, as far as it still has them."""
        outcome = None
        for _ in range(MAX_REPLAY_ROUNDS):
            outcome = await self._replay_round()
            if outcome is not None or self._is_new:
                break
        if not self._is_new:
            self._metrics.replays.labels(self.engine_id, outcome or "incomplete").inc()

    async def _replay_round(self) -> str | None:
        """One question; None where its answers have a hole and the rest has to be asked for again."""
        first = self._next_number
        outcome = "complete"
        try:
            async with aclosing(self._replay.ask(first)) as answers:
                async for number, payload in answers:
                    if self._is_new or number > self._next_number > first:
                        return None
                    if number > self._next_number:
                        outcome = "incomplete"
                        self._lose_until(number)
                    if number == self._next_number:
                        self.apply(payload)
        except TimeoutError:
            return "unanswered"
        except WireError as error:
            self._metrics.bad_events.labels(self.engine_id).inc()
            logger.warning("unusable KV event replay of engine %s: %s", self.engine_id, error)
            return "unanswered"
        return outcome

    def _lose_until(self, number: int) -> None:
        """Nobody has the events before this one any more."""
        self._forget(f"events {self._next_number} to {number - 1} are lost")
        self._next_number = number

    def _forget(self, reason: str) -> None:
        self._index.clear(self.engine_id)
        self._has_lost = True
        self._report_until_s = time.monotonic() + REPORT_S
        self._metrics.dropped_indexes.labels(self.engine_id).inc()
        logger.warning("forgetting the KV of engine %s: %s", self.engine_id, reason)

    def apply(self, payload: bytes) -> None:
        """Take the batch that is next in order."""
        self._next_number += 1
        try:
            for event in decode_events(payload):
                self._metrics.events.labels(self.engine_id, self._take(event)).inc()
        except (WireError, RecursionError) as error:
            self._metrics.bad_events.labels(self.engine_id).inc()
            self._forget(str(error))

    def _take(self, event: KvEvent | None) -> str:
        """Enter one event into the index; returns its kind for the metrics."""
        if event is None:
            return "unknown"
        if isinstance(event, AllBlocksCleared):
            self._index.clear(self.engine_id)
            self._report_until_s = 0.0
            return "cleared"
        if event.medium not in _HERE:
            return "elsewhere"
        if not event.is_plain:
            return "partial"
        if isinstance(event, BlockStored):
            known = self._index.store(
                self.engine_id,
                event.block_hashes,
                event.parent_block_hash,
                event.token_ids,
                event.block_size,
                event.keys(),
                may_repeat=self._has_lost,
            )
            if not known and self._has_lost:
                self._report_until_s = time.monotonic() + REPORT_S
            return "stored" if known else "orphan"
        self._index.remove(self.engine_id, event.block_hashes)
        return "removed"
