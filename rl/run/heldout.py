"""Held-out problems: what the policy earns on problems it is never trained on, one greedy answer each, always the same problems."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from random import Random
from statistics import fmean

from msgspec import Struct

from rl.config import HeldoutSettings, RunSettings
from rl.controllers import priority
from rl.environments.interface import EnvironmentFailed, Problem
from rl.environments.pool import EnvironmentPool
from rl.environments.settings import EnvironmentConfig
from rl.generator.counts import GeneratorCounts
from rl.generator.episodes import Episodes
from rl.generator.gateway import Gateway
from rl.generator.rendering import TargetText
from rl.generator.seats import Seats
from rl.generator.state import OpenRollout
from rl.generator.target_watch import TargetWatch
from rl.generator.turns import RunningRollout, TurnFailed, Turns
from rl.rewards.combination import combine
from wire.errors import RolloutError
from wire.spec import SCHEMA_VERSION

_NUM_RESAMPLES = 2000
_CONFIDENCE = 0.95


class HeldoutResult(Struct, frozen=True, kw_only=True, tag="rl_heldout"):
    """One environment at one moment of a run."""

    schema_version: int = SCHEMA_VERSION
    at_s: float
    num_steps: int
    """Made before."""
    version: int
    """Of the target."""
    environment: str
    rewards: tuple[float | None, ...]
    """By problem; None where environment or gateway failed."""

    @property
    def mean(self) -> float | None:
        """None where all failed."""
        known = [reward for reward in self.rewards if reward is not None]
        return fmean(known) if known else None


class Heldout:
    """Plays the problems through the gateway, as many at a time as training ever may, in seats of its own."""

    def __init__(
        self,
        settings: RunSettings,
        heldout: HeldoutSettings,
        *,
        environments: Sequence[EnvironmentConfig],
        pool: EnvironmentPool,
        gateway: Gateway,
        target: TargetText,
    ) -> None:
        self._settings, self._heldout, self._environments = settings, heldout, environments
        self._pool, self._gateway, self._target = pool, gateway, target

    async def measure(self, *, num_steps: int, version: int) -> list[HeldoutResult]:
        """One result for each environment. The target must not change meanwhile."""
        episodes = self._episodes(version)
        found = []
        for environment in self._environments:
            seeds = range(self._heldout.num_problems)
            async with asyncio.TaskGroup() as tasks:
                played = [tasks.create_task(self._reward(episodes, environment.name, seed)) for seed in seeds]
            found.append(
                HeldoutResult(
                    at_s=time.time(),
                    num_steps=num_steps,
                    version=version,
                    environment=environment.name,
                    rewards=tuple(task.result() for task in played),
                )
            )
        return found

    def _episodes(self, version: int) -> Episodes:
        generator = self._settings.generator
        turns = Turns(
            generator,
            self._gateway,
            _Places(generator.concurrency.most),
            TargetWatch(version),
            GeneratorCounts(),
            vocab_size=self._target.vocab_size,
            stop_token_ids=self._target.stop_token_ids,
        )
        return Episodes(generator, self._pool, self._target, turns, time.time)

    async def _reward(self, episodes: Episodes, environment: str, seed: int) -> float | None:
        rollout = RunningRollout(seed, environment, 0.0, OpenRollout(sample_index=0, submitted_s=time.time()))
        try:
            trajectories = await episodes.play(rollout, Problem(environment, seed, "heldout"))
        except (EnvironmentFailed, TurnFailed, RolloutError):
            return None
        parts = combine(trajectories[0].reward_parts, self._settings.reward)
        return sum(part.weight * part.value for part in parts)


class _Places(Seats):
    """So many at a time, in the order they come; nobody is preempted."""

    def __init__(self, number: int) -> None:
        self._free = asyncio.Semaphore(number)

    @asynccontextmanager
    async def seat(self, rollout_id: str) -> AsyncIterator[int]:
        async with self._free:
            yield priority.FIRST


def gain(first: HeldoutResult, last: HeldoutResult) -> tuple[float, float, float] | None:
    """(mean gain, lower and upper end of its 95 % interval) over problems that both have; None where there are none.

    Percentile bootstrap over problems (Efron 1979), paired, from a fixed seed.
    """
    differences = [
        after - before
        for before, after in zip(first.rewards, last.rewards, strict=False)
        if before is not None and after is not None
    ]
    if not differences:
        return None
    random = Random(0)
    means = sorted(fmean(random.choices(differences, k=len(differences))) for _ in range(_NUM_RESAMPLES))
    tail = round(_NUM_RESAMPLES * (1.0 - _CONFIDENCE) / 2.0)
    return fmean(differences), means[tail], means[-tail - 1]


def told(results: Sequence[HeldoutResult]) -> str:
    """Of one moment, in a line."""
    means = [f"{result.environment} {_told_mean(result)}" for result in results]
    return f"held out, after {results[0].num_steps} steps: {', '.join(means)} ({len(results[0].rewards)} problems each)"


def _told_mean(result: HeldoutResult) -> str:
    """With how many its mean leaves out."""
    num_failed = sum(reward is None for reward in result.rewards)
    if result.mean is None:
        return "failed"
    return f"{result.mean:.3f}" + (f" without {num_failed} that failed" if num_failed else "")


def gains(results: Sequence[HeldoutResult]) -> list[str]:
    """From the first to the last measurement, a line for each environment that has two."""
    lines = []
    for environment in sorted({result.environment for result in results}):
        own = [result for result in results if result.environment == environment]
        found = gain(own[0], own[-1]) if len(own) > 1 else None
        if found is not None:
            mean, low, high = found
            lines.append(
                f"held out, {environment}: {own[0].mean or 0.0:.3f} after {own[0].num_steps} steps, {own[-1].mean or 0.0:.3f} after "
                f"{own[-1].num_steps}; gain {mean:+.3f} ({low:+.3f} to {high:+.3f})"
            )
    return lines
