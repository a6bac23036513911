"""SystemConfig: everything `paceline up` needs, one table per concern."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from learner.config import LearnerSettings
from server.config import AdmissionSettings, CanarySettings, CaptureSettings, GatewaySettings
from wire.config import Config


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
