"""How old rollouts are when they are trained on."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from msgspec import Struct

from rl.trajectory import Trajectory
from wire.errors import RolloutError
from wire.spec import SCHEMA_VERSION


class StalenessReport(Struct, frozen=True, kw_only=True, tag="staleness_report"):
    """trainer -> live view and disk. Staleness: versions from a trajectory's oldest token to the target it is trained at."""

    schema_version: int
    num_trajectories: int
    p50: int
    p99: int
    worst: int
    spans_mean: float
    """Stretches of one version per trajectory; 1 where no update fell into it."""
    spans_max: int


def staleness(trajectories: Sequence[Trajectory], version: int) -> StalenessReport:
    """Percentiles are nearest-rank. Raises RolloutError where there are no trajectories, or one is from the future."""
    if not trajectories:
        raise RolloutError("no trajectories to tell the staleness of; report after a batch was taken")
    ages = sorted(version - trajectory.oldest_version for trajectory in trajectories)
    if ages[0] < 0:
        raise RolloutError(f"a trajectory is {-ages[0]} versions ahead of version {version}; give the version it is trained at")
    spans = [trajectory.num_spans for trajectory in trajectories]
    return StalenessReport(
        schema_version=SCHEMA_VERSION,
        num_trajectories=len(ages),
        p50=ages[ceil(0.50 * len(ages)) - 1],
        p99=ages[ceil(0.99 * len(ages)) - 1],
        worst=ages[-1],
        spans_mean=sum(spans) / len(spans),
        spans_max=max(spans),
    )
