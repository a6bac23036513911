"""Throughput matching of the RL controllers, simulated: no engine and no trainer, so it is the same on every machine."""

from __future__ import annotations

from loadtest.bars.child import answer_of
from loadtest.bars.registry import Bench, Measured


async def simulated(_bench: Bench) -> dict[str, Measured]:
    """Trainer and generator at 100:60 and at 60:100 with the same units each."""
    runs = await answer_of("rl.controllers.measure")
    return {
        "matching_100_60_pct": Measured(runs["100:60"]["slower_utilisation_pct"], runs["100:60"]),
        "matching_60_100_pct": Measured(runs["60:100"]["slower_utilisation_pct"], runs["60:100"]),
        "matching_over_staleness": Measured(
            max(run["over_staleness_bound"] for run in runs.values()),
            {name: {key: run[key] for key in ("staleness_bound", "evicted_pct")} for name, run in runs.items()},
        ),
    }
