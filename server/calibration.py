"""Calibration: does the AL that the gate simulates tell what a draft does when it serves?

The gate compares drafts by simulated AL, which is no measurement: it judges every position, teacher-forced, where serving starts
from some. Only if the two go together is the gate's order of drafts worth something.

Nothing is stored for this. Simulated AL is in the manifests, served AL in the engines' cumulative counters, so a gateway that
restarts knows both again, as far back as engines live and manifests are kept. A change of the target leaves only drafts
that were made since: the gate judged those before on another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import StatisticsError, correlation, fmean

from server.tally import Tally
from wire.control import CalibrationPair, CalibrationView

MIN_PAIRS = 3
"""Below that a correlation is 1 or says nothing."""


def calibrate(simulated_al: Mapping[int, float], served: Mapping[int, Tally], *, min_verify_steps: int) -> CalibrationView:
    """Pairs of all versions with both numbers, and what they say together. Both arguments are by version."""
    pairs = tuple(
        CalibrationPair(
            version=version,
            simulated_al=simulated_al[version],
            served_al=1.0 + sum(tally.rates()),
            num_verify_steps=tally.num_verify_steps,
        )
        for version, tally in sorted(served.items())
        if version in simulated_al and tally.num_verify_steps >= min_verify_steps
    )
    if not pairs:
        return CalibrationView()
    bias = fmean(pair.served_al - pair.simulated_al for pair in pairs)
    return CalibrationView(pairs=pairs, bias=bias, correlation=_correlation(pairs))


def _correlation(pairs: tuple[CalibrationPair, ...]) -> float | None:
    if len(pairs) < MIN_PAIRS:
        return None
    try:
        return correlation([pair.simulated_al for pair in pairs], [pair.served_al for pair in pairs])
    except StatisticsError:  # one of the two is the same for all
        return None
