"""`python -m rl.controllers.measure`: throughput matching where trainer and generator begin at 100 to 60, and at 60 to 100.

Prints one JSON object: for both, the utilisation of the slower side in the worst window of NUM_MATCHING update intervals after
the first NUM_MATCHING, over all seeds; what the moves brought in the window in which they brought least; and how stale the stalest
group was. The slower side is at work whoever is matched with it, so utilisation alone tells nothing of the moves.
"""

from __future__ import annotations

import json
from itertools import islice

from rl.controllers.simulate import World, matched, noisy, num_moves, slower_utilisation, trained_tokens_per_s
from rl.controllers.split import Split, SplitLimits

NUM_MATCHING = 10
"""Update intervals within which they must be matched."""
NUM_INTERVALS = 60
SEEDS = range(8)
NOISE = 0.05
"""Deviation of a reading's logarithm."""
START = Split(users=2, rollouts=8, trainer=8, learner=1)
LIMITS = SplitLimits(least=Split(2, 1, 1, 1), most=Split(19, 19, 19, 19))


def imbalance(trainer: float, generator: float, limits: SplitLimits = LIMITS) -> dict[str, float]:
    """`trainer` and `generator` are tokens/s of a unit of each; both begin with as many units."""
    world = World(trainer_tokens_per_s=trainer, generator_tokens_per_s=generator, update_s=0.5)
    runs = [
        [
            interval
            for interval, _ in islice(
                matched(lambda _: world, limits, START, seed=seed, spoil=noisy(seed, NOISE)), NUM_INTERVALS
            )
        ]
        for seed in SEEDS
    ]
    late = [run[first : first + NUM_MATCHING] for run in runs for first in range(NUM_MATCHING, NUM_INTERVALS, NUM_MATCHING)]
    every = [interval for run in runs for interval in run]
    return {
        "slower_utilisation_pct": 100.0 * min(slower_utilisation(window) for window in late),
        "worst_interval_pct": 100.0 * min(slower_utilisation([interval]) for window in late for interval in window),
        "over_staleness_bound": max(max(interval.max_staleness for interval in every) - world.max_staleness, 0),
        "staleness_bound": world.max_staleness,
        "evicted_pct": 100.0 * sum(interval.num_evicted for interval in every) / (len(every) * world.groups_per_update),
        "throughput_over_first_split": min(map(trained_tokens_per_s, late)) / world.tokens_per_s_at(START),
        "max_moves": max(num_moves(run) for run in runs),
        "num_runs": len(runs),
    }


if __name__ == "__main__":
    print(json.dumps({"100:60": imbalance(100.0, 60.0), "60:100": imbalance(60.0, 100.0)}))
