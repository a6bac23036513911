"""The statistic of `rl.consistency.two_sample` written down plainly, from counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rl.consistency.two_sample import Answer, features


def statistic(on: Sequence[Sequence[Answer]], off: Sequence[Sequence[Answer]]) -> float:
    total = 0.0
    for with_it, without in zip(on, off, strict=True):
        counts_on = Counter(feature for answer in with_it for feature in features(answer))
        counts_off = Counter(feature for answer in without for feature in features(answer))
        for feature in counts_on | counts_off:
            difference = counts_on[feature] / len(with_it) - counts_off[feature] / len(without)
            total += difference**2 / (counts_on[feature] + counts_off[feature])
    return total
