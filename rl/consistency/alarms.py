"""From which numbers on training and inference no longer agree, and what to look at then.

`FLOORS` are for tokens that the trainer's own weights drew (`Rescored.of_version`): what is left is arithmetic. `HEALTH` is for the
tokens of a training step, older weights included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rl.consistency.divergence import DivergenceReport


@dataclass(frozen=True)
class Limit:
    """A number of the report and the range it is healthy in."""

    name: str
    value: Callable[[DivergenceReport], float]
    advice: str
    low: float = float("-inf")
    high: float = float("inf")


@dataclass(frozen=True)
class Alarm:
    name: str
    value: float
    text: str


_SAME_WEIGHTS = (
    "the engine's weights, KV or sampling are not the trainer's: check version and checksum, cache salt, temperature"
)

FLOORS: Mapping[str, tuple[Limit, ...]] = {
    # Measured on the CPU with a model of 135M: mean 2e-6 to 4e-6, max 6e-5 in float32; mean 2.4e-2, k3 1e-3 in bfloat16, where
    # larger models are closer (others alarm at a mean of 0.03).
    "float32": (
        Limit("mean |d log p|", lambda report: report.abs_logprob.mean, _SAME_WEIGHTS, high=2e-5),
        Limit("max |d log p|", lambda report: report.abs_logprob.max, _SAME_WEIGHTS, high=1e-3),
    ),
    "bfloat16": (
        Limit("mean |d log p|", lambda report: report.abs_logprob.mean, _SAME_WEIGHTS, high=0.04),
        Limit("k3", lambda report: report.k3, _SAME_WEIGHTS, high=3e-3),
    ),
}
"""By the dtype the engine computes in."""

_OLD = "rollouts are too far from the policy: lower eta or the learning rate, or sync more often"
HEALTH = (
    # By the guides of prime-rl, NeMo RL and verl; a tenth of the tokens is ours.
    Limit("k3", lambda report: report.k3, _OLD, high=1e-3),
    Limit("mult_prob_error", lambda report: report.mult_prob_error, _OLD, high=1.05),
    Limit("importance weight, mean", lambda report: report.is_mean, _OLD, low=0.5, high=2.0),
    Limit("importance weight, std", lambda report: report.is_std, _OLD, high=1.0),
    Limit("effective sample size", lambda report: report.ess, _OLD, low=0.3),
    Limit("masked fraction", lambda report: report.masked_fraction, "widen sequence_band, or find why pi/mu is off", high=0.1),
    Limit(
        "clipped fraction", lambda report: report.clipped_fraction, "fewer optimiser steps per batch, or smaller ones", high=0.1
    ),
)


def alarms(report: DivergenceReport, limits: Sequence[Limit]) -> list[Alarm]:
    """One for each number outside its range; a number that is none is outside."""
    found = []
    for limit in limits:
        value = limit.value(report)
        if not limit.low <= value <= limit.high:
            text = f"{limit.name} is {value:.3g}, healthy is {limit.low:g} to {limit.high:g}; {limit.advice}"
            found.append(Alarm(limit.name, value, text))
    return found
