"""Estimate: a number that is not known exactly."""

from __future__ import annotations

from typing import NamedTuple


class Estimate(NamedTuple):
    """A mean and its standard deviation."""

    mean: float
    deviation: float
