"""What a controller may believe of a metric: a finite number that is not negative, else it counts as missing."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from statistics import median

WINDOW = 5
"""Readings of which the median is taken: two wild ones in five change nothing."""


def believable(value: float | None, *, most: float | None = None) -> float | None:
    """The value, or None for one that is missing, not finite, negative or above `most`."""
    if value is None or not isfinite(value) or value < 0.0 or (most is not None and value > most):
        return None
    return value


def extended(window: Sequence[float], value: float) -> tuple[float, ...]:
    """The newest WINDOW readings with one more."""
    return (*window, value)[-WINDOW:]


def middle(window: Sequence[float]) -> float:
    """Median of a window that is not empty."""
    return median(window)
