"""Settings of the learner role."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from wire.config import Config


class ReplaySettings(Config):
    """`[learner.replay]`: what is kept to learn from. All of it in host memory, bounded."""

    recent_tokens: int = Field(60_000, ge=1)
    """Completion tokens in the recent window."""
    reservoir_tokens: int = Field(60_000, ge=0)
    """Completion tokens in the per-domain reservoirs together."""
    holdout_share: float = Field(0.10, gt=0.0, lt=1.0)
    """Share of requests, by hash of the prompt, that is never trained on: the gate's evidence."""


class TrainSettings(Config):
    """`[learner.train]`: how the draft is trained."""

    unroll: int = Field(3, ge=1)
    """Draft steps per position (TTT); at least the served speculation depth."""
    seed: int = 0


class GateSettings(Config):
    """`[learner.gate]`: when a candidate is good enough to serve."""

    every_s: float = Field(20.0, gt=0.0)
    """Least time between two evaluations."""
    min_holdout_requests: int = Field(4, ge=2)
    confidence: float = Field(0.95, gt=0.5, lt=1.0)
    """One-sided level at which the bootstrap must exclude 'no gain'."""
    min_gain: float = Field(0.02, ge=0.0)
    """Simulated AL a candidate must add."""
    max_anchor_drop: float = Field(0.05, ge=0.0)
    """Simulated AL that no domain may lose."""


class LearnerSettings(Config):
    """`[learner]`."""

    enabled: bool = True
    num_threads: int = Field(1, ge=1)
    nice: int = Field(10, ge=0, le=19)
    checkpoint_every_s: float = Field(30.0, gt=0.0)
    keep_versions: int = Field(8, ge=2)
    replay: ReplaySettings = ReplaySettings()
    train: TrainSettings = TrainSettings()
    gate: GateSettings = GateSettings()


class LearnerConfig(Config):
    """Resolved configuration of the learner role."""

    learner: LearnerSettings
    target_dir: Path
    state_dir: Path
    capture_endpoint: str
    """ZMQ address the PULL socket binds to."""
    admin_url: str
    """Base URL of the gateway's admin port."""
    num_speculative_tokens: int
