"""Engines as the router sees them: real state, no process behind it."""

from __future__ import annotations

from typing import cast

import aiohttp
from prometheus_client import CollectorRegistry
from samples import SPEC

from server.config import EngineEndpoint, PoolKind, RoutingSettings
from server.engines import EngineClient
from server.fleet import Engine, Fleet
from server.routing.index import KvIndex
from server.routing.metrics import RoutingMetrics
from server.routing.router import Router
from server.routing.tokens import Prompt
from wire.control import EngineStatus, KvLayout, WorkerStatus
from wire.spec import SCHEMA_VERSION

BLOCK = 16
MAX_MODEL_LEN = 4096
BYTES_PER_TOKEN = 1024
_TRANSFERS = {"combined": "none", "prefill": "kv_producer", "decode": "kv_consumer"}


def make_engine(engine_id: str, kind: PoolKind = "combined", *, num_speculative_tokens: int = 0) -> Engine:
    """A ready engine; nobody ever calls it."""
    endpoint = EngineEndpoint(id=engine_id, kind=kind, url="http://127.0.0.1:1", events_endpoint="")
    engine = Engine(EngineClient(endpoint, cast(aiohttp.ClientSession, None)), "", kind)
    worker = WorkerStatus(
        rank=0, pid=1, runner="v1", parts=[], draft_version=0, target_version=0, staged_versions=[], capture_rate=0.0
    )
    engine.adopt(
        EngineStatus(
            schema_version=SCHEMA_VERSION,
            engine_id=engine_id,
            engine_epoch="1",
            vllm_version="0.32.0",
            spec=SPEC,
            num_speculative_tokens=num_speculative_tokens,
            depth=num_speculative_tokens,
            kv=KvLayout(
                block_size_tokens=BLOCK,
                bytes_per_token=BYTES_PER_TOKEN,
                num_blocks=1024,
                max_model_len=MAX_MODEL_LEN,
                transfer=_TRANSFERS[kind],
            ),
            workers=[worker],
        )
    )
    engine.mark_ready()
    return engine


class RouterRig:
    """A router over some engines."""

    def __init__(self, *engines: Engine, policy: str = "kv_aware") -> None:
        self.registry = CollectorRegistry()
        self.index = KvIndex(1 << 20)
        self.engines = engines
        settings = RoutingSettings.model_validate({"policy": policy})
        self.router = Router(Fleet(engines), self.index, settings, RoutingMetrics(self.registry))

    def hold(self, engine: Engine, prompt: Prompt) -> None:
        """Let an engine hold all of a prompt, as its events would say."""
        tokens = list(prompt.token_ids or ())
        num_blocks = len(tokens) // BLOCK
        hashes = [hash(tuple(tokens[: (number + 1) * BLOCK])) for number in range(num_blocks)]
        self.index.store(engine.id, hashes, None, tokens[: num_blocks * BLOCK], BLOCK)

    def routed(self, path: str, reason: str) -> float:
        return self.registry.get_sample_value("paceline_routed_total", {"path": path, "reason": reason}) or 0.0

    def predicted(self, outcome: str) -> float:
        return self.registry.get_sample_value("paceline_kv_predictions_total", {"outcome": outcome}) or 0.0


def prompt_of(num_tokens: int, *, start: int = 0, session: str | None = None) -> Prompt:
    return Prompt(tuple(range(start, start + num_tokens)), session=session)
