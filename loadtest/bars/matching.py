"""Throughput matching of the RL controllers, simulated: no engine and no trainer, so it is the same on every machine."""

from __future__ import annotations

from collections.abc import Mapping

from loadtest.bars.child import answer_of
from loadtest.bars.registry import Bench, Measured


async def simulated(_bench: Bench) -> dict[str, Measured]:
    """Trainer and generator at 100:60 and at 60:100 with the same units each."""
    return measured(await answer_of("rl.controllers.measure"))


def measured(runs: Mapping[str, Mapping[str, float]]) -> dict[str, Measured]:
    """runs: what `rl.controllers.measure` says of each imbalance, by its name."""
    return {
        "matching_100_60_pct": Measured(runs["100:60"]["slower_utilisation_pct"], dict(runs["100:60"])),
        "matching_60_100_pct": Measured(runs["60:100"]["slower_utilisation_pct"], dict(runs["60:100"])),
        "matching_over_first_split": Measured(
            min(run["throughput_over_first_split"] for run in runs.values()),
            {name: run["throughput_over_first_split"] for name, run in runs.items()},
        ),
        "matching_over_staleness": Measured(
            max(run["over_staleness_bound"] for run in runs.values()),
            {name: {key: run[key] for key in ("staleness_bound", "evicted_pct")} for name, run in runs.items()},
        ),
    }
