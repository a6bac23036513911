"""Estimates of what takes how long: what was seen counts less the more was seen since, and the longer ago it was.

Without the second, one bad minute would decide for ever: a pool that looks slow gets nothing to do, so nothing would show that it
has become fast.
"""

from __future__ import annotations

from dataclasses import dataclass

LEARNING_RATE = 0.1
MAX_STEP = 4.0
"""One observation counts as at most this many times the estimate, and at least one such part of it."""
HALF_LIFE_S = 30.0
"""After that long without an observation half of what is known is forgotten."""


@dataclass(slots=True)
class Estimate:
    """Seconds a unit takes, as seen last at `seen_at_s` (monotonic clock)."""

    value_s: float
    seen_at_s: float

    def learn(self, seen_s: float, now_s: float) -> None:
        seen_s = min(max(seen_s, self.value_s / MAX_STEP), self.value_s * MAX_STEP)
        kept = (1.0 - LEARNING_RATE) * self._left(now_s)
        self.value_s = seen_s + kept * (self.value_s - seen_s)
        self.seen_at_s = now_s

    def faded(self, unknown_s: float, now_s: float) -> float:
        """On its way to `unknown_s`, what it would be if nothing had been seen, where that is less: it is tried again then."""
        return min(self.value_s, unknown_s + (self.value_s - unknown_s) * self._left(now_s))

    def _left(self, now_s: float) -> float:
        return float(0.5 ** (max(now_s - self.seen_at_s, 0.0) / HALF_LIFE_S))
