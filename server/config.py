"""Settings of the serving roles: the gateway process and our parts inside each engine process."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from wire.config import Config
from wire.dfkv import DfkvSettings


class CaptureSettings(Config):
    """`[capture]`: what leaves the engine for the learner."""

    enabled: bool = True
    """Off: hidden rows are never copied, whatever the rate."""
    rate: float = Field(1.0, ge=0.0, le=1.0)
    """Share of requests captured, chosen by a hash of the request id; adjustable at run time."""
    max_queued_steps: int = Field(256, ge=1)
    """Steps waiting in the engine for the channel; newer ones are dropped and counted."""
    max_queued_bytes: int = Field(256 * 1024 * 1024, ge=1)
    """Hidden rows waiting in the engine for the channel; a long prompt on a wide model is tens of MB in one step."""
    max_queued_messages: int = Field(64, ge=1)
    """ZMQ high-water mark, messages."""


PoolKind = Literal["combined", "prefill", "decode"]
"""`combined` prefills and decodes by itself; `prefill` computes KV that a `decode` engine pulls. A decode engine can prefill too."""

KV_LEASE_S = 20
"""How long a prefill engine keeps KV for a pull; a decode engine that waits for its turn renews it."""


class EngineEndpoint(Config):
    """How the gateway reaches one engine."""

    id: str
    kind: PoolKind = "combined"
    url: str
    """Base URL of the private HTTP port."""
    events_endpoint: str
    """ZMQ address the engine's PUB socket is bound to."""
    kv_replay_endpoint: str = ""
    """ZMQ address at which the engine repeats KV events that were missed; empty: it publishes none."""


class RoutingSettings(Config):
    """`[routing]`: which engine a request goes to."""

    policy: Literal["kv_aware", "session", "power_of_two", "round_robin"] = "kv_aware"
    max_index_blocks: int = Field(1 << 18, ge=1)
    """KV blocks remembered over all engines, about 700 bytes each; the oldest are forgotten first."""
    max_moves: int = Field(2, ge=0)
    """Times one request may lose its engine and go on elsewhere. Bounded, because a request can be what kills engines."""


class CanarySettings(Config):
    """`[canary]`: the watch over live AL after a commit, and over the active draft against the floor (`server/floor.py`)."""

    min_verify_steps: int = Field(200, ge=1)
    """Verify steps of the new draft before a verdict."""
    max_relative_drop: float = Field(0.10, gt=0.0, lt=1.0)
    """Live AL may fall short of the previous draft's by this share of it, per domain mix; more rolls back."""
    deadline_s: float = Field(600.0, gt=0.0)
    """Without enough traffic by then the draft stays and the canary ends undecided."""
    check_every_s: float = Field(1.0, gt=0.0)
    watch_floor: bool = True
    """Off: what serves is not compared with the floor. Published recipes know no floor; this is here to be compared with."""


class AdmissionSettings(Config):
    """`[admission]`: bounds of the gateway's queue; over them the client gets 429 or 503 with Retry-After."""

    max_in_flight: int = Field(256, ge=1)
    max_body_bytes: int = Field(4 * 1024 * 1024, ge=1024)
    max_choices: int = Field(128, ge=1)
    """Largest `n` of one request; each choice is a sequence in the engine."""
    body_timeout_s: float = Field(30.0, gt=0.0)
    """For a client to send its whole request body; a slow one would hold its place in the queue."""


class GatewaySettings(Config):
    """`[gateway]`: the public and the admin port."""

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    admin_host: str = "127.0.0.1"
    admin_port: int = Field(8001, ge=0, le=65535)
    max_label_values: int = Field(64, ge=1)
    """Distinct tenants and domains kept as metric labels; further ones count as `other`."""
    swap_deadline_s: float = Field(60.0, gt=0.0)
    """For staging and committing a draft on all engines."""
    health_interval_s: float = Field(1.0, gt=0.0)
    """Between two health probes of one engine."""
    health_timeout_s: float = Field(5.0, gt=0.0)
    """For one probe; three in a row without an answer make an engine not ready."""
    core_interval_s: float = Field(5.0, gt=0.0)
    """Between two probes of one engine's core, which its health route does not touch."""
    core_timeout_s: float = Field(30.0, gt=0.0)
    """For one probe of a core, which waits for the step in flight: a full prefill step takes about 10 s on a small CPU.

    Two in a row without an answer make an engine not ready, one a prefill engine.
    """
    engine_idle_timeout_s: float = Field(600.0, gt=0.0)
    """Longest silence of an engine while a request runs on it."""
    shutdown_grace_s: float = Field(10.0, ge=0.0)
    """For running requests to end after SIGTERM."""


KV_STORE_DIRECTORY = "kv"
"""In the state directory."""


class DepthSettings(Config):
    """`[depth]`: speculation depth K, by batch size."""

    mode: Literal["fixed", "auto"] = "fixed"
    """`fixed`: K is `draft.num_speculative_tokens` for every batch. `auto`: the gateway sets each engine's K between 0 and that
    while it runs, from what steps cost and how much is accepted; `GET /admin/depth` says why."""


class RolloutSettings(Config):
    """`[rollouts]`: `/inference/v1/generate`, token ids in and out for training the target."""

    enabled: bool = False
    """Engines then serve it, schedule by priority, and tell log-probabilities of the distribution tokens are drawn from, to everybody:
    at another temperature than 1 users get other numbers than without."""


class KvStoreSettings(Config):
    """`[kv_store]`: KV of finished conversations beyond the engines' life, for a follow-up turn after an engine's restart."""

    enabled: bool = False
    """Off by default: what was said stays as KV, requests kept from the learner included."""
    max_bytes: int = Field(10_000_000_000, ge=1)
    """Of the files under `<state>/kv`; the oldest prefixes are removed first."""
    dfkv: DfkvSettings | None = None
    """There instead of in files; its servers have bounds of their own."""


class GatewayConfig(Config):
    """Resolved configuration of the gateway role."""

    gateway: GatewaySettings
    admission: AdmissionSettings
    canary: CanarySettings
    routing: RoutingSettings = RoutingSettings()
    kv_store: KvStoreSettings = KvStoreSettings()
    depth: DepthSettings = DepthSettings()
    engines: tuple[EngineEndpoint, ...] = Field(min_length=1)
    kv_events_endpoint: str = ""
    """ZMQ address the gateway binds for the engines' KV events; empty: they publish none."""
    target_dir: Path | None = None
    """Where the target's tokenizer and chat template are; None or not on disk: prompts are not tokenized here."""
    state_dir: Path


class EnginePartsConfig(Config):
    """Resolved configuration of our parts inside one engine process (read from $PACELINE_ENGINE_CONFIG)."""

    engine_id: str
    state_dir: Path
    target_dir: Path
    draft_vocab_size: int
    aux_layer_ids: tuple[int, ...] | None
    capture: CaptureSettings
    capture_endpoint: str
    """ZMQ address the learner's PULL socket is bound to."""
    events_endpoint: str
    """ZMQ address this engine's PUB socket binds to."""
