"""SystemConfig: everything `paceline up` needs, one table per concern."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from learner.config import LearnerSettings
from rl.config import RunSettings, read_environments
from server.config import (
    AdmissionSettings,
    CanarySettings,
    CaptureSettings,
    DepthSettings,
    GatewaySettings,
    KvStoreSettings,
    PoolKind,
    RolloutSettings,
    RoutingSettings,
)
from wire.config import Config, load_tables
from wire.environment import paceline_home

LOOPBACK = "127.0.0.1"


class TargetSettings(Config):
    """`[target]`: the model that is served."""

    path: str = "smollm2-135m-instruct"
    """A name `paceline model fetch` knows, a local Hugging Face directory, or a hub id."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"


class DraftSettings(Config):
    """`[draft]`: the speculative draft."""

    num_speculative_tokens: int = Field(3, ge=1, le=16)
    """K, tokens proposed per verify step."""
    vocab_size: int = Field(8192, ge=1)
    """Rows of the draft's head, the tokens it can propose; smaller than the target's vocabulary. Raised, existing drafts grow."""
    aux_layer_ids: tuple[int, ...] | None = None
    """Target layers the draft reads; vLLM's EAGLE-3 default where absent."""
    checkpoint: Path | None = None
    """An existing EAGLE-3 checkpoint to start from; a random draft where absent."""
    seed: int = 0


class PoolSettings(Config):
    """`[[pool]]`: one engine replica."""

    id: str = Field("engine-0", pattern=r"^[a-z0-9][a-z0-9-]*$")
    kind: PoolKind = "combined"
    cores: tuple[int, ...] | None = None
    """CPU cores its compute threads are bound to; shared out by the plan where absent."""
    gpus: tuple[int, ...] | None = Field(None, min_length=1)
    """GPUs it may use, as the driver numbers them; all where absent. Several share the model (tensor parallel)."""
    port: int = Field(8100, ge=0, le=65535)
    """Private HTTP port, loopback only; 0 takes a free one."""
    side_channel_port: int = Field(0, ge=0, le=65535)
    """Where another engine asks how to pull its KV (NIXL's handshake), loopback only; 0 takes a free one."""


_ROLE_NAMES = frozenset({"gateway", "learner"})


class LaunchSettings(Config):
    """`[launch]`: how `paceline up` starts and watches the processes."""

    engine_deadline_s: float = Field(900.0, gt=0.0)
    """An engine must be ready by then; it compiles for one to three minutes on a CPU."""
    gateway_deadline_s: float = Field(60.0, gt=0.0)
    grace_s: float = Field(20.0, gt=0.0)
    """Between SIGTERM and SIGKILL at shutdown."""
    max_backoff_s: float = Field(30.0, gt=0.0)
    """Longest wait before a process that keeps dying is started again."""
    kv_events_port: int = Field(0, ge=0, le=65535)
    """Where the gateway hears which engine holds which KV, loopback only; 0 takes a free one."""


class StateSettings(Config):
    """`[state]`."""

    dir: Path | None = None
    """Drafts, checkpoints, logs and resolved configuration; `$PACELINE_HOME/state` where absent."""

    @property
    def directory(self) -> Path:
        return (self.dir or paceline_home() / "state").expanduser().absolute()


class SystemConfig(Config):
    """The merged TOML files and `--set` overrides."""

    target: TargetSettings = TargetSettings()
    draft: DraftSettings = DraftSettings()
    engine: dict[str, Any] = Field(default_factory=dict)
    """`[engine]`: options of `vllm serve`, in its spelling with underscores; vLLM validates them."""
    pool: tuple[PoolSettings, ...] = (PoolSettings(),)
    capture: CaptureSettings = CaptureSettings()
    gateway: GatewaySettings = GatewaySettings()
    admission: AdmissionSettings = AdmissionSettings()
    routing: RoutingSettings = RoutingSettings()
    kv_store: KvStoreSettings = KvStoreSettings()
    canary: CanarySettings = CanarySettings()
    depth: DepthSettings = DepthSettings()
    rollouts: RolloutSettings = RolloutSettings()
    learner: LearnerSettings = LearnerSettings()
    state: StateSettings = StateSettings()
    launch: LaunchSettings = LaunchSettings()
    rl: RunSettings = RunSettings()
    """What `paceline rl run` does; the system itself takes no notice of it."""
    environment: tuple[dict[str, Any], ...] = ()
    """`[[environment]]`: where a run's problems come from, by `kind` (`rl/environments/registry.py`)."""

    @model_validator(mode="after")
    def _pools_are_distinct(self) -> Self:
        if not self.pool:
            raise ValueError("at least one [[pool]] is needed")
        ids = [pool.id for pool in self.pool]
        if len(set(ids)) != len(ids):
            raise ValueError(f"pool ids must differ, got {ids}; give each [[pool]] its own id")
        if taken := _ROLE_NAMES.intersection(ids):
            raise ValueError(f"pool id {min(taken)!r} is the name of another process; take another id")
        by_port: dict[int, list[str]] = {}
        for name, (_, port) in self.listeners().items():
            by_port.setdefault(port, []).append(name)
        shared = [f"{port}: {', '.join(names)}" for port, names in by_port.items() if port and len(names) > 1]
        if shared:
            raise ValueError(
                f"ports must differ, but one is wanted more than once ({'; '.join(shared)}); give others, 0 takes a free one"
            )
        return self

    @model_validator(mode="after")
    def _prefilled_kv_has_a_reader(self) -> Self:
        kinds = [pool.kind for pool in self.pool]
        if "prefill" in kinds and "decode" not in kinds:
            raise ValueError(
                f"prefill pools need a decode pool that pulls their KV, got {kinds}; add a [[pool]] with kind = 'decode', "
                "or make them combined"
            )
        return self

    @model_validator(mode="after")
    def _stored_kv_has_one_owner(self) -> Self:
        if self.kv_store.enabled and any(self.transfers_kv(pool) for pool in self.pool):
            raise ValueError(
                "kv_store.enabled keeps KV of combined engines only; set kv_store.enabled = false, or make the pools combined"
            )
        if self.kv_store.dfkv is not None and not self.kv_store.enabled:
            raise ValueError(
                "kv_store.dfkv is set but kv_store.enabled is false, so nothing is kept; set kv_store.enabled = true"
            )
        return self

    @model_validator(mode="after")
    def _environments_are_known(self) -> Self:
        read_environments(self.environment, source="the configuration")
        return self

    @property
    def publishes_kv_events(self) -> bool:
        """Whether engines tell the gateway what their KV caches hold: with one engine there is nothing to choose."""
        return len(self.pool) > 1

    def transfers_kv(self, pool: PoolSettings) -> bool:
        """Whether the engine hands KV over or pulls it. Without a prefill pool a decode pool is a combined one."""
        return pool.kind != "combined" and any(other.kind == "prefill" for other in self.pool)

    @property
    def kv_events_endpoint(self) -> str:
        """ZMQ address the gateway binds for KV events; empty where engines publish none."""
        return f"tcp://{LOOPBACK}:{self.launch.kv_events_port}" if self.publishes_kv_events else ""

    def listeners(self) -> dict[str, tuple[str, int]]:
        """(host, port) of every numbered port this system listens on, by the setting that chooses it."""
        gateway = self.gateway
        found = {f"pool {pool.id}": (LOOPBACK, pool.port) for pool in self.pool}
        found |= {
            f"pool {pool.id} side_channel_port": (LOOPBACK, pool.side_channel_port)
            for pool in self.pool
            if self.transfers_kv(pool)
        }
        found |= {"gateway.port": (gateway.host, gateway.port), "gateway.admin_port": (gateway.admin_host, gateway.admin_port)}
        if self.publishes_kv_events:
            found["launch.kv_events_port"] = (LOOPBACK, self.launch.kv_events_port)
        return found

    @classmethod
    def load(cls, paths: Sequence[Path], overrides: Sequence[str] = ()) -> Self:
        """TOML files merged left to right, then `--set` overrides; raises ConfigError."""
        source = " + ".join([str(path) for path in paths] + [f"--set {text}" for text in overrides])
        return cls.build(load_tables(paths, overrides), source=source or "the default configuration")
