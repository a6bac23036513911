"""SystemConfig: everything `paceline up` needs, one table per concern."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from learner.config import LearnerSettings
from server.config import AdmissionSettings, CanarySettings, CaptureSettings, GatewaySettings
from wire.config import Config, load_tables


def paceline_home() -> Path:
    """Where models and state live: $PACELINE_HOME, else ~/.cache/paceline."""
    return Path(os.environ.get("PACELINE_HOME") or Path.home() / ".cache" / "paceline")


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
    """Rows of the draft's head; smaller than the target's vocabulary."""
    aux_layer_ids: tuple[int, ...] | None = None
    """Target layers the draft reads; vLLM's EAGLE-3 default where absent."""
    checkpoint: Path | None = None
    """An existing EAGLE-3 checkpoint to start from; a random draft where absent."""
    seed: int = 0


class PoolSettings(Config):
    """`[[pool]]`: one engine replica."""

    id: str = Field("engine-0", pattern=r"^[a-z0-9][a-z0-9-]*$")
    kind: Literal["combined"] = "combined"
    cores: tuple[int, ...] | None = None
    """CPU cores its compute threads are bound to; shared out by the plan where absent."""
    port: int = Field(8100, ge=0, le=65535)
    """Private HTTP port, loopback only."""


class LaunchSettings(Config):
    """`[launch]`: how `paceline up` starts and watches the processes."""

    engine_deadline_s: float = Field(900.0, gt=0.0)
    """An engine must be ready by then; it compiles for one to three minutes on a CPU."""
    gateway_deadline_s: float = Field(60.0, gt=0.0)
    grace_s: float = Field(20.0, gt=0.0)
    """Between SIGTERM and SIGKILL at shutdown."""
    max_backoff_s: float = Field(30.0, gt=0.0)
    """Longest wait before a process that keeps dying is started again."""


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
    canary: CanarySettings = CanarySettings()
    learner: LearnerSettings = LearnerSettings()
    state: StateSettings = StateSettings()
    launch: LaunchSettings = LaunchSettings()

    @model_validator(mode="after")
    def _pools_are_distinct(self) -> Self:
        if not self.pool:
            raise ValueError("at least one [[pool]] is needed")
        ids = [pool.id for pool in self.pool]
        if len(set(ids)) != len(ids):
            raise ValueError(f"pool ids must differ, got {ids}; give each [[pool]] its own id")
        ports = [pool.port for pool in self.pool if pool.port]
        ports += [port for port in (self.gateway.port, self.gateway.admin_port) if port]
        if len(set(ports)) != len(ports):
            raise ValueError(
                f"ports must differ, got {sorted(ports)}; set pool.port, gateway.port and gateway.admin_port apart"
            )
        return self

    @classmethod
    def load(cls, paths: Sequence[Path], overrides: Sequence[str] = ()) -> Self:
        """TOML files merged left to right, then `--set` overrides; raises ConfigError."""
        source = " + ".join([str(path) for path in paths] + [f"--set {text}" for text in overrides])
        return cls.build(load_tables(paths, overrides), source=source or "the default configuration")
