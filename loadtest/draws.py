"""What is drawn at random for a load test: arrival times, which source, which prompt. Pure; the same seed draws the same."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from loadtest.scenario import Phase, Poisson

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


def generator(seed: int, *names: object) -> np.random.Generator:
    """A stream of random numbers of its own for everything that has a name: adding a lane does not change the others."""
    digest = hashlib.sha256("/".join(map(str, (seed, *names))).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:16], "big"))


def arrival_times(arrivals: Poisson, duration_s: float, draw: np.random.Generator) -> Floats:
    """Seconds from the start of the phase, ascending, all before its end.

    Intervals of mean 1 are drawn and laid on the cumulative rate, so a ramp keeps the burstiness that was asked for.
    """
    end_rate_per_s = arrivals.rate_per_s if arrivals.end_rate_per_s is None else arrivals.end_rate_per_s
    growth = (end_rate_per_s - arrivals.rate_per_s) / (2 * duration_s)
    num_expected = (arrivals.rate_per_s + end_rate_per_s) / 2 * duration_s
    counts = _renewals(arrivals.burstiness, num_expected, draw)
    root = np.sqrt(np.maximum(arrivals.rate_per_s**2 + 4 * growth * counts, 0.0))
    times_s = 2 * counts / (arrivals.rate_per_s + root)
    return times_s[times_s < duration_s]


def _renewals(shape: float, end: float, draw: np.random.Generator) -> Floats:
    """Sums of gamma intervals of mean 1, up to `end`."""
    sums = np.empty(0)
    last = 0.0
    while last < end:
        intervals = draw.gamma(shape, 1 / shape, size=int(end - last) + 64)
        sums = np.concatenate([sums, last + np.cumsum(intervals)])
        last = float(sums[-1])
    return sums[sums < end]


class Mix:
    """The weights of a phase's sources over its time."""

    def __init__(self, phase: Phase) -> None:
        end = phase.traffic if phase.end_traffic is None else phase.end_traffic
        self.names = list(dict.fromkeys([*phase.traffic, *end]))
        self._start, self._end = (_shares(weights, self.names) for weights in (phase.traffic, end))
        self._both = list(zip(self.names, self._start.tolist(), self._end.tolist(), strict=True))

    def choose(self, progress: Floats, uniforms: Floats) -> Integers:
        """Index into `names` for each share of the phase that has gone by and uniform number between 0 and 1."""
        shares = self._start + (self._end - self._start) * progress[:, None]
        return np.minimum((uniforms[:, None] >= np.cumsum(shares, axis=1)).sum(axis=1), len(self.names) - 1)

    def choose_one(self, progress: float, uniform: float) -> str:
        """The name; the same choice as `choose` makes, quick for a single one."""
        left = uniform
        for name, start, end in self._both:
            left -= start + (end - start) * progress
            if left < 0:
                return name
        return self.names[-1]


def _shares(weights: dict[str, float], names: Sequence[str]) -> Floats:
    total = sum(weights.values())
    return np.array([weights.get(name, 0.0) / total for name in names])


class Deck:
    """The prompts of one source in a drawn order, round and round, each round in another order."""

    def __init__(self, size: int, draw: np.random.Generator) -> None:
        """`size` prompts, at least one."""
        self._size = size
        self._draw = draw
        self._left: Integers = np.empty(0, dtype=np.int64)

    def take(self, count: int) -> Integers:
        """The numbers of the next prompts."""
        while len(self._left) < count:
            self._left = np.concatenate([self._left, self._draw.permutation(self._size)])
        taken, self._left = self._left[:count], self._left[count:]
        return taken
