"""Regression: is this run better or worse than another one, measure by measure, or can it not be told?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import NormalDist

from loadtest.measures import bootstrap
from loadtest.measures.headline import MEASURES, Measure
from loadtest.statistics import Estimate

SMALLEST_RATIO = 0.01
"""A change of less than 1 % is no verdict, however sure it is."""
SMALLEST_DIFFERENCE = 0.001
"""The same for shares."""


@dataclass(frozen=True)
class Comparison:
    """One measure in two runs."""

    measure: Measure
    before: float
    after: float
    change: Estimate
    """After over before, or for shares after less before; the interval is the one that the verdict rests on."""
    num_pairs: int | None
    """Prompts that both runs answered, where it was compared prompt by prompt."""
    verdict: str
    """`better`, `worse` or `undecided`."""


def regression(before: Mapping[str, Estimate], after: Mapping[str, Estimate]) -> list[Comparison]:
    """Compare what both runs measured, each with its own interval: the runs are independent."""
    shared = [measure for measure in MEASURES if measure.name in before and measure.name in after]
    level = bootstrap.level_for(len(shared))
    return [independent(measure, before[measure.name], after[measure.name], level) for measure in shared]


def independent(measure: Measure, before: Estimate, after: Estimate, level: float) -> Comparison:
    """Compare two estimates of one measure, made apart from each other."""
    if measure.by == "difference":
        change = bootstrap.difference(widened(after, level), widened(before, level))
    elif min(before.value, after.value) <= 0:
        change = Estimate(float("nan"), float("nan"), float("nan"))
    else:
        change = exponential(bootstrap.difference(widened(_log(after), level), widened(_log(before), level)))
    return Comparison(measure, before.value, after.value, change, None, verdict(measure, change))


def verdict(measure: Measure, change: Estimate) -> str:
    """Decided only if the whole interval lies on one side, and the change is large enough to matter."""
    neutral, smallest = (1.0, SMALLEST_RATIO) if measure.by == "ratio" else (0.0, SMALLEST_DIFFERENCE)
    has_grown = change.low > neutral
    has_shrunk = change.high < neutral
    if not (has_grown or has_shrunk) or abs(change.value - neutral) < smallest:
        return "undecided"
    return "better" if has_grown == (measure.better == "higher") else "worse"


def worse(comparisons: Sequence[Comparison]) -> list[str]:
    """Titles of the measures that got worse."""
    return [comparison.measure.title for comparison in comparisons if comparison.verdict == "worse"]


def exponential(logs: Estimate) -> Estimate:
    """From the logarithm of a ratio to the ratio."""
    return Estimate(exp(logs.value), exp(logs.low), exp(logs.high))


def _log(estimate: Estimate) -> Estimate:
    # An interval that reaches 0 is no bound at all on the scale of ratios.
    return Estimate(
        log(estimate.value), log(estimate.low) if estimate.low > 0 else float("-inf"), log(max(estimate.high, 1e-300))
    )


def widened(estimate: Estimate, level: float) -> Estimate:
    """From the level of a report's intervals to this one."""
    normal = NormalDist()
    factor = normal.inv_cdf((1 + level) / 2) / normal.inv_cdf((1 + bootstrap.LEVEL) / 2)
    below, above = factor * (estimate.value - estimate.low), factor * (estimate.high - estimate.value)
    return Estimate(estimate.value, estimate.value - below, estimate.value + above)
