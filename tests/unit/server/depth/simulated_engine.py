"""A simulated engine for the depth controller: true step times and acceptance are known, noise is drawn from a seed.

What a run brought is counted in expected tokens, so that it can be compared with that of a constant K on the same machine
at the same moments without the noise of single draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp, sqrt
from random import Random

from server.depth.controller import DepthController
from server.depth.readings import Reading, Steps
from server.tally import Tally
from wire.depth import bucket_of

MAX_DEPTH = 3
MAX_REQUESTS = 16
PLAIN_STEP_S = 0.035

Draft = tuple[float, ...]
"""P(more than i proposals accepted)."""
COLD: Draft = (0.0, 0.0, 0.0)
FAIR: Draft = (0.42, 0.2, 0.1)
GOOD: Draft = (0.75, 0.55, 0.4)


def slope(num_requests: int) -> float:
    """Share of a plain step that one more proposal adds, as on a small CPU: 8 % alone, 23 % in fours."""
    return min(0.08 + 0.05 * (num_requests - 1), 0.4)


def step_s(num_requests: int, depth: int) -> float:
    return PLAIN_STEP_S * (1.0 + 0.1 * (num_requests - 1)) * (1.0 + slope(num_requests) * depth)


def tokens(draft: Draft, depth: int) -> float:
    return 1.0 + sum(draft[:depth])


def best_depth(draft: Draft, num_requests: int) -> int:
    return max(range(MAX_DEPTH + 1), key=lambda depth: tokens(draft, depth) / step_s(num_requests, depth))


class Simulation:
    """Runs a controller second by second. `batch` and `draft` say what the traffic and the draft are at a second."""

    def __init__(
        self,
        *,
        batch: Callable[[int], int],
        draft: Callable[[int], tuple[int, Draft]],
        seed: int = 0,
        step_noise: float = 0.1,
        drift: float = 0.03,
    ) -> None:
        self.controller = DepthController([MAX_DEPTH] * MAX_REQUESTS, MAX_DEPTH)
        self._batch, self._draft = batch, draft
        self._random = Random(seed)
        self._step_noise, self._drift = step_noise, drift
        self._level = 0.0
        """Logarithm of how slow the machine is, which wanders."""
        self._table = self.controller.table()
        self.second = 0
        self.num_tokens = 0.0
        """Expected, of one request."""
        self.num_constant = [0.0] * (MAX_DEPTH + 1)
        """What each constant K would have brought."""
        self.num_ideal = 0.0
        """What the best K for each batch and draft would have brought."""

    def run(self, num_seconds: int) -> Simulation:
        for _ in range(num_seconds):
            self._run_second()
        return self

    def run_until(self, condition: Callable[[], bool], *, at_most: int) -> int:
        """Seconds until it holds."""
        for second in range(at_most):
            if condition():
                return second
            self._run_second()
        raise AssertionError(f"it does not hold after {at_most} s: {self.controller.table()}")

    def depths(self, batches: Sequence[int]) -> list[int]:
        """K in force, a trial left out."""
        return [self.controller.buckets[bucket_of(number)].depth for number in batches]

    def _run_second(self) -> None:
        self._level = 0.95 * self._level + self._random.gauss(0.0, self._drift)
        num_requests = self._batch(self.second)
        version, draft = self._draft(self.second)
        depth = self._table[num_requests - 1]
        self._count(draft, num_requests, depth)
        reading = self._reading(version, draft, num_requests, depth)
        self.second += 1
        self.controller.update(reading, float(self.second))
        self._table = self.controller.table()

    def _count(self, draft: Draft, num_requests: int, depth: int) -> None:
        speeds = [tokens(draft, each) / (step_s(num_requests, each) * exp(self._level)) for each in range(MAX_DEPTH + 1)]
        self.num_tokens += speeds[depth]
        self.num_ideal += max(speeds)
        for each, speed in enumerate(speeds):
            self.num_constant[each] += speed

    def _reading(self, version: int, draft: Draft, num_requests: int, depth: int) -> Reading:
        mean_s = step_s(num_requests, depth) * exp(self._level)
        num_steps = max(int(1.0 / mean_s), 1)
        total_s = num_steps * mean_s * exp(self._random.gauss(0.0, self._step_noise / sqrt(num_steps)))
        num_verified = num_steps * num_requests if depth else 0
        counts: list[int] = []
        for share in draft[:depth]:
            drawn = round(self._random.gauss(num_verified * share, sqrt(num_verified * share * (1.0 - share))))
            counts.append(min(max(drawn, 0), counts[-1] if counts else num_verified))
        tally = Tally(num_verified, (num_verified,) * depth, tuple(counts))
        return Reading(version, {(bucket_of(num_requests), depth): Steps(num_steps, total_s)}, tally)
