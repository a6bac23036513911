"""Percentiles from histograms of high dynamic range, with intervals from a block bootstrap.

A bin is never wider than 1/1024 of the values it holds, from a microsecond to hours; so a percentile is off by at most 0.05 %,
and ten million waits between chunks take no more memory than ten thousand. A histogram per block of time makes a resample of
the run a sum of histograms: `counts = weights @ matrix`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def sums_by(numbers: Ints, amounts: Floats, length: int) -> Floats:
    """Sum of the amounts that have each number, from 0 on."""
    return np.bincount(numbers, weights=amounts, minlength=length).astype(float)


def counts_by(numbers: Ints, length: int) -> Floats:
    """How often each number occurs, from 0 on."""
    return np.bincount(numbers, minlength=length).astype(float)


_BITS = 10
"""2 ** 10 bins per doubling."""
_PER_DOUBLING = 1 << _BITS
_UNITS_PER_S = 1e6


def bin_of(seconds: Floats) -> Ints:
    """The bin of each value; values below zero count as zero."""
    units = np.maximum(np.rint(np.asarray(seconds, dtype=float) * _UNITS_PER_S), 0.0).astype(np.int64)
    _, exponents = np.frexp(units.astype(float))
    shifts = np.maximum(exponents - 1 - _BITS, 0).astype(np.int64)
    return shifts * _PER_DOUBLING + (units >> shifts)


def middle_of(bins: Ints) -> Floats:
    """The value in seconds that stands for each bin: its middle, and below 2 ms, where bins hold one value, that value."""
    shifts = np.maximum(bins // _PER_DOUBLING - 1, 0)
    low = (bins - shifts * _PER_DOUBLING) << shifts
    return (low + ((1 << shifts) - 1) / 2.0) / _UNITS_PER_S


class BlockHistogram:
    """Counts of values by block and bin, empty bins left out."""

    def __init__(self, seconds: Floats, blocks: Ints, num_blocks: int) -> None:
        bins, columns = np.unique(bin_of(seconds), return_inverse=True)
        self.values_s = middle_of(bins)
        """What each column stands for, rising."""
        cells = np.bincount(blocks * len(bins) + columns, minlength=num_blocks * len(bins))
        self.counts = cells.reshape(num_blocks, len(bins)).astype(float)
        """[blocks, columns]."""

    def quantile(self, share: float) -> float:
        """Of all values."""
        return float(self._quantiles(np.cumsum(self.counts.sum(axis=0, keepdims=True), axis=1), share)[0])

    def resampled(self, weights: Floats, shares: list[float]) -> Floats:
        """Quantiles [shares, resamples] of the resamples that take block b `weights[r, b]` times; NaN of empty ones."""
        below = np.cumsum(weights @ self.counts, axis=1)
        return np.stack([self._quantiles(below, share) for share in shares])

    def _quantiles(self, below: Floats, share: float) -> Floats:
        """Of each row of cumulated counts; linear between the two nearest ranks, as numpy does by default."""
        sizes = below[:, -1]
        ranks = share * np.maximum(sizes - 1.0, 0.0)
        lower = np.floor(ranks)
        first = self.values_s[_column_of_rank(below, lower)]
        second = self.values_s[_column_of_rank(below, np.minimum(lower + 1.0, np.maximum(sizes - 1.0, 0.0)))]
        return np.where(sizes > 0, first + (ranks - lower) * (second - first), np.nan)


def _column_of_rank(below: Floats, ranks: Floats) -> Ints:
    """The column that holds the value of this rank, ranks from 0, row by row."""
    found = (below > ranks[:, None]).argmax(axis=1)
    return np.asarray(found, dtype=np.int64)
