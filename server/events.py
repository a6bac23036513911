"""The event channel: subscribes to each engine's `stats` topic and hands every message to the ledger and depth control.

A lost or odd message costs nothing: counters are cumulative, the next one makes up for it.
"""

from __future__ import annotations

import logging
import time

import zmq
import zmq.asyncio

from server.acceptance import AcceptanceLedger
from server.canary import Canary
from server.depth.control import DepthControl
from server.fleet import Engine
from server.metrics import Metrics
from server.swap import SwapCoordinator
from wire.errors import WireError
from wire.messages import TOPIC_STATS, EngineStats, decode

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
MAX_QUEUED_MESSAGES = 16
MAX_DISAGREEMENTS = 3
"""Messages in a row naming another draft or target than the gateway believes in, before the engine is asked; one is a race."""


class StatsListener:
    """Feeds EngineStats to whoever needs them."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        ledger: AcceptanceLedger,
        canary: Canary,
        swap: SwapCoordinator,
        depth: DepthControl,
        metrics: Metrics,
    ) -> None:
        self._context = context
        self._ledger = ledger
        self._canary = canary
        self._swap = swap
        self._depth = depth
        self._metrics = metrics
        self._disagreements: dict[str, int] = {}

    async def listen(self, engine: Engine) -> None:
        """Receive one engine's stats for as long as the gateway runs."""
        with self._context.socket(zmq.SUB) as socket:
            socket.linger = 0
            socket.rcvhwm = MAX_QUEUED_MESSAGES
            socket.maxmsgsize = MAX_MESSAGE_BYTES
            socket.subscribe(TOPIC_STATS)
            socket.connect(engine.events_endpoint)
            while True:
                frames = await socket.recv_multipart()
                try:
                    self._take(engine, frames)
                except WireError as error:
                    self._metrics.bad_events.labels(engine.id).inc()
                    logger.warning("unusable event from engine %s: %s", engine.id, error)

    def _take(self, engine: Engine, frames: list[bytes]) -> None:
        if len(frames) != 2:
            raise WireError(f"{len(frames)} frames, expected topic and message")
        stats = decode(frames[1])
        if not isinstance(stats, EngineStats):
            raise WireError(f"a {type(stats).__name__} under topic {TOPIC_STATS.decode()}")
        if stats.engine_id != engine.id:
            raise WireError(f"it calls itself {stats.engine_id!r}; check events_endpoint in the configuration")
        watched = self._canary.view
        keep = {watched.version, watched.baseline_version, self._swap.drafts.active, self._swap.drafts.floor}
        self._ledger.ingest(stats, keep_versions=frozenset(version for version in keep if version is not None))
        self._depth.ingest(engine, stats, now_s=time.time())
        self._compare(engine, stats)

    def _compare(self, engine: Engine, stats: EngineStats) -> None:
        """Ask an engine anew where its own word and the gateway's belief differ."""
        if not engine.ready:
            return
        if stats.engine_epoch != engine.epoch:
            logger.warning("engine %s has restarted", engine.id)
            engine.request_sync()
            return
        told = (stats.draft_version, stats.target_version)
        agrees = told == (engine.draft_version, engine.target_version) or self._swap.is_busy
        count = 0 if agrees else self._disagreements.get(engine.id, 0) + 1
        if count >= MAX_DISAGREEMENTS:
            logger.warning(
                "engine %s serves draft %d and target %d, expected %s and %s",
                engine.id,
                *told,
                engine.draft_version,
                engine.target_version,
            )
            engine.request_sync()
            count = 0
        self._disagreements[engine.id] = count
