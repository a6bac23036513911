"""What every environment's configuration has."""

from __future__ import annotations

from wire.config import Config


class EnvironmentConfig(Config):
    """One `[[environment]]` table; each kind adds a `kind` of its own and its fields."""

    name: str
    """How problems, metrics and trajectories call it; distinct within a run."""
