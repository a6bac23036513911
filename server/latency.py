"""Latency: times counted in classes narrow enough to draw quantiles from, which can be subtracted and added up."""

from __future__ import annotations

import math
from collections import Counter

GROWTH = 1.1
"""Upper by lower end of a class: a time told by its class is off by 5 % at most."""
SHORTEST_S, LONGEST_S = 0.001, 600.0
_NUM_CLASSES = math.ceil(math.log(LONGEST_S / SHORTEST_S, GROWTH))
_CLASSES_PER_E = 1.0 / math.log(GROWTH)
_MIDDLES_S = tuple(float(f"{SHORTEST_S * GROWTH ** (index + 0.5):.3g}") for index in range(_NUM_CLASSES))


class Latencies:
    """How often each class of times was met: at most 140 counts, however many times."""

    def __init__(self) -> None:
        self.counts: Counter[float] = Counter()
        """By the class's geometric middle in seconds; they only grow."""

    def observe(self, time_s: float) -> None:
        """Count one; what is beyond the shortest or the longest class counts with that."""
        index = int(math.log(max(time_s, SHORTEST_S) / SHORTEST_S) * _CLASSES_PER_E)
        self.counts[_MIDDLES_S[min(index, _NUM_CLASSES - 1)]] += 1
