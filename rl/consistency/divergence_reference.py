"""The divergence report written down plainly, token by token. Tests hold `rl.consistency.divergence` to it."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import ceil, exp, factorial, sqrt


def abs_logprob(differences: Sequence[float]) -> tuple[int, float, float, float]:
    """(number, mean, p99, max) of |d|; p99 is the smallest one that 99 % do not exceed."""
    ordered = sorted(abs(difference) for difference in differences)
    if not ordered:
        return 0, 0.0, 0.0, 0.0
    return len(ordered), sum(ordered) / len(ordered), ordered[ceil(0.99 * len(ordered)) - 1], ordered[-1]


def in_bucket(behaviour: Sequence[float], trainer: Sequence[float], low: float, high: float) -> list[float]:
    return [pi - mu for pi, mu in zip(trainer, behaviour, strict=True) if low < exp(mu) <= high]


def k3(differences: Sequence[float]) -> float:
    """Mean e^d - 1 - d by its series in exact arithmetic, for |d| up to about 1."""
    total = Fraction(0)
    for difference in differences:
        d = Fraction(difference)
        total += sum((d**power / factorial(power) for power in range(2, 14)), start=Fraction(0))
    return float(total / len(differences))


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def std(values: Sequence[float]) -> float:
    return sqrt(mean([(value - mean(values)) ** 2 for value in values]))


def ess(weights: Sequence[float]) -> float:
    return mean(weights) ** 2 / mean([weight**2 for weight in weights])


def spans(versions: Sequence[Sequence[int]]) -> list[int]:
    """How often the version changes in each sequence, plus one."""
    return [sum(1 for t, version in enumerate(each) if t == 0 or version != each[t - 1]) for each in versions]
