"""Confidence intervals. The unit that is drawn again is a block of time, not a request.

Requests that are in the system together share batches and queues and are slow together. Drawn one by one they would count as
independent, and the intervals would come out far too narrow; few, long blocks keep what belongs together.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from loadtest.measures.histogram import Floats, Ints, counts_by, sums_by
from loadtest.statistics import Estimate

NUM_RESAMPLES = 1000
LEVEL = 0.95
NUM_BLOCKS = 20
"""Of a run. More would be shorter and depend on each other; fewer would say too little of how they differ."""
NOTHING = Estimate(float("nan"), float("nan"), float("nan"))
"""Of a measure that nothing was measured for."""


@dataclass(frozen=True)
class Blocks:
    """A division of the measured span into equal blocks, and the resamples drawn from them."""

    start_s: float
    length_s: float
    weights: Floats
    """How often each resample takes each block, [resamples, blocks]."""

    @property
    def number(self) -> int:
        return int(self.weights.shape[1])

    def of(self, times_s: Floats) -> Ints:
        """The block of each instant; those outside the span belong to the nearest block."""
        return np.clip((times_s - self.start_s) // self.length_s, 0, self.number - 1).astype(np.int64)


def divide(start_s: float, end_s: float) -> Blocks:
    """Twenty blocks of equal length."""
    return Blocks(start_s, max(end_s - start_s, 1e-9) / NUM_BLOCKS, _weights(NUM_BLOCKS))


def equal(number: int, *, seed: int = 0) -> Blocks:
    """Blocks that are given: values come in `number` parts already. Independent samples need seeds of their own."""
    return Blocks(0.0, 1.0, _weights(max(number, 1), seed))


def _weights(number: int, seed: int = 0) -> Floats:
    rng = np.random.default_rng(seed)
    return rng.multinomial(number, np.full(number, 1.0 / number), size=NUM_RESAMPLES).astype(float)


def ratio(blocks: Blocks, numerators: Floats, denominators: Floats) -> Estimate:
    """Sum over sum, both given by block: a share, a rate, a mean."""
    total = float(denominators.sum())
    if total <= 0:
        return NOTHING
    below = blocks.weights @ denominators
    resampled = np.divide(blocks.weights @ numerators, below, out=np.full(len(below), np.nan), where=below > 0)
    return around(float(numerators.sum()) / total, resampled, blocks.number)


def share(blocks: Blocks, hits: Floats, numbers: Floats) -> Estimate:
    """Hits among `numbers`, by block. Never narrower than for independent trials: no failure seen is not yet no failure."""
    clustered = ratio(blocks, hits, numbers)
    independent = wilson(int(hits.sum()), int(numbers.sum()))
    low, high = min(clustered.low, independent.low), max(clustered.high, independent.high)
    return Estimate(clustered.value, max(low, 0.0), min(high, 1.0))


def mean(blocks: Blocks, values: Floats, block_of: Ints) -> Estimate:
    """Of values that lie in these blocks."""
    return ratio(blocks, sums_by(block_of, values, blocks.number), counts_by(block_of, blocks.number))


def around(value: float, resampled: Floats, num_units: int) -> Estimate:
    """`value` and the middle 95 % of the resamples, of `num_units` units each; empty resamples say nothing."""
    usable = resampled[~np.isnan(resampled)]
    if len(usable) == 0 or num_units < 2:
        return Estimate(float(value), float("nan"), float("nan"))
    low, high = np.quantile(usable, ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    widening = _widening(num_units)
    return Estimate(float(value), float(value - widening * (value - low)), float(value + widening * (high - value)))


def _widening(num_units: int) -> float:
    """A bootstrap of few units is too narrow: by their number less one, and by Student's t instead of the normal."""
    z, freedom = NormalDist().inv_cdf((1 + LEVEL) / 2), num_units - 1
    # Student's t from the normal (Abramowitz and Stegun 26.7.5): within 0.3 % from four degrees of freedom on.
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    return t / z * (num_units / freedom) ** 0.5


def wilson(num_hits: int, number: int) -> Estimate:
    """A share of independent trials."""
    if number == 0:
        return NOTHING
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    share = num_hits / number
    middle = (share + z * z / (2 * number)) / (1 + z * z / number)
    half = z / (1 + z * z / number) * (share * (1 - share) / number + z * z / (4 * number * number)) ** 0.5
    return Estimate(share, max(min(share, middle - half), 0.0), min(max(share, middle + half), 1.0))


def difference(treated: Estimate, control: Estimate) -> Estimate:
    """Of two independent estimates by their own intervals (MOVER: Zou and Donner, Statistics in Medicine 27, 2008)."""
    value = treated.value - control.value
    below = ((treated.value - treated.low) ** 2 + (control.high - control.value) ** 2) ** 0.5
    above = ((treated.high - treated.value) ** 2 + (control.value - control.low) ** 2) ** 0.5
    return Estimate(value, value - below, value + above)


def level_for(number_of_verdicts: int) -> float:
    """The level of each interval so that all of them cover at once with 95 % (Bonferroni)."""
    return 1.0 - (1.0 - LEVEL) / max(number_of_verdicts, 1)
