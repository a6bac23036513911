"""Who computes on which core. vLLM's own choice would put two engines of one host on the same core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launch.config import SystemConfig
from wire.errors import ConfigError

_MIN_CORES_FOR_SPARE = 4
"""From here on one core is left to the HTTP processes; below, they share with everybody."""


@dataclass(frozen=True, kw_only=True)
class CoreShares:
    pools: dict[str, tuple[int, ...]]
    learner: tuple[int, ...]
    """Its own; none where the engines have them all, and it takes, last of all, whatever time any core has left."""


def share_cores(config: SystemConfig, available: Sequence[int]) -> CoreShares:
    """The first cores to the engines' compute threads, the last to the learner if engines leave one, everything else unpinned.

    Raises ConfigError where a pool names a core this machine does not offer.
    """
    free = list(available)
    for pool in config.pool:
        foreign = set(pool.cores or ()) - set(available)
        if foreign:
            raise ConfigError(f"pool {pool.id}: cores {sorted(foreign)} are not available here; available: {sorted(available)}")
        free = [core for core in free if core not in (pool.cores or ())]

    unplaced = [pool for pool in config.pool if not pool.cores]
    # The engines come first: every pool keeps a core of its own before the learner gets one to itself.
    wanted = config.learner.num_processes * config.learner.num_threads if config.learner.enabled else 0
    num_learner = min(wanted, max(len(free) - len(unplaced), 0))
    learner = tuple(free[len(free) - num_learner :])
    compute = free[: len(free) - num_learner]
    if len(available) >= _MIN_CORES_FOR_SPARE and len(compute) > len(unplaced):
        compute = compute[:-1]

    pools = {pool.id: tuple(pool.cores) for pool in config.pool if pool.cores}
    compute = compute or list(available[:1])
    share, extra = divmod(len(compute), max(len(unplaced), 1))
    start = 0
    for index, pool in enumerate(unplaced):
        size = share + (index < extra)
        pools[pool.id] = tuple(compute[start : start + size]) or (compute[index % len(compute)],)
        start += size
    return CoreShares(pools=pools, learner=learner)
