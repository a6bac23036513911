"""Which target version this worker process computes with, for parts that vLLM makes and that cannot be handed it."""

from __future__ import annotations

from collections.abc import Callable

from wire.errors import ConfigError

_source: Callable[[], int] | None = None


def follow_target_version(source: Callable[[], int]) -> None:
    """Name where the version is kept: where the target's weights change."""
    global _source
    _source = source


def target_version() -> int:
    """The version in force now; raises ConfigError in a process without our worker."""
    if _source is None:
        raise ConfigError(
            "the KV store needs our worker class, which knows the target's version; start engines with `paceline up`"
        )
    return _source()
