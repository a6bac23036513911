"""The canary's and the floor watch's decision: is one draft worse on live traffic than another? Pure numbers, no clock, no engine.

The two are compared domain by domain and weighted by the new draft's mix, so a shift of traffic between domains is not
mistaken for a change of the draft. A drop counts only where it is larger than the setting allows and larger than chance
explains. Verify steps of one request are alike, so many of them tell less than their number says: how much less, the design
effect, is measured on the baseline.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Literal

from server.tally import Tally, total

NUM_SIGMAS = 3.0
"""The decision is taken anew every second, so chance gets many tries; three sigmas keep false alarms rare."""
_PRIOR_DESIGN_EFFECT = 4.0
"""1 + (m - 1) r (Kish 1965) with requests of m = 60 verify steps, of whose variance r = 5 % is between requests."""
_PRIOR_BATCHES = 4
"""So many batches the prior is worth."""
MIN_BASELINE_STEPS = 20
"""A domain with fewer verify steps of the baseline is left out of the comparison."""


@dataclass(frozen=True, slots=True)
class Verdict:
    outcome: Literal["wait", "pass", "roll_back"]
    reason: str
    num_verify_steps: int
    """Of the new draft, in domains that can be compared."""
    candidate_al: float | None = None
    baseline_al: float | None = None


@dataclass(frozen=True, slots=True)
class _Comparison:
    """One domain: mean accepted tokens per verify step of both drafts over the positions both proposed."""

    num_steps: int
    candidate_mean: float
    baseline_mean: float
    variance: float
    """Of the difference of the two means."""


def judge(
    candidate: Mapping[str, Tally],
    baseline: Mapping[str, Tally],
    *,
    min_verify_steps: int,
    max_relative_drop: float,
    design_effect: float,
    num_sigmas: float = NUM_SIGMAS,
) -> Verdict:
    """The verdict on `candidate` (tallies by domain) against `baseline`."""
    comparisons = [
        _compare(tally, baseline[domain])
        for domain, tally in candidate.items()
        if tally.num_verify_steps and domain in baseline and baseline[domain].num_verify_steps >= MIN_BASELINE_STEPS
    ]
    num_steps = sum(comparison.num_steps for comparison in comparisons)
    if num_steps < min_verify_steps:
        num_all = total(candidate.values()).num_verify_steps
        return Verdict("wait", f"{num_steps} of {min_verify_steps} comparable verify steps, {num_all} in all", num_steps)
    weights = [comparison.num_steps / num_steps for comparison in comparisons]
    weighted = list(zip(weights, comparisons, strict=True))
    candidate_al = 1.0 + sum(weight * one.candidate_mean for weight, one in weighted)
    baseline_al = 1.0 + sum(weight * one.baseline_mean for weight, one in weighted)
    noise = num_sigmas * sqrt(design_effect * sum(weight**2 * one.variance for weight, one in weighted))
    drop = baseline_al - candidate_al
    facts = f"AL {candidate_al:.3f} against {baseline_al:.3f} over {num_steps} verify steps (noise bound {noise:.3f})"
    if drop <= max_relative_drop * baseline_al:
        return Verdict("pass", f"{facts}: no drop beyond {max_relative_drop:.0%}", num_steps, candidate_al, baseline_al)
    if drop <= noise:
        return Verdict("wait", f"{facts}: a drop, but within noise", num_steps, candidate_al, baseline_al)
    return Verdict("roll_back", f"{facts}: a drop beyond {max_relative_drop:.0%}", num_steps, candidate_al, baseline_al)


def measure_design_effect(windows: Iterable[Sequence[Tally]]) -> float:
    """Variance of a mean over verify steps, as a multiple of what it were if they were independent; at least 1.

    By batch means (Law & Carson, Oper. Res. 27, 1979): each window is a sequence of batches that outlast a request, and the
    spread of their means is compared with that of single steps. Moderated by a prior: few batches tell little.
    """
    excess, num_free = _PRIOR_DESIGN_EFFECT * _PRIOR_BATCHES, _PRIOR_BATCHES
    for batches in windows:
        if len(batches) < 2:
            continue
        whole = total(batches)
        depth = min(map(_depth, batches))
        mean, variance = _moments(whole, depth)
        squares = sum(batch.num_verify_steps * (_moments(batch, depth)[0] - mean) ** 2 for batch in batches)
        excess += squares / (variance * whole.num_verify_steps)
        num_free += len(batches) - 1
    return max(excess / num_free, 1.0)


def _compare(candidate: Tally, baseline: Tally) -> _Comparison:
    depth = min(_depth(candidate), _depth(baseline))
    candidate_mean, candidate_variance = _moments(candidate, depth)
    baseline_mean, baseline_variance = _moments(baseline, depth)
    return _Comparison(candidate.num_verify_steps, candidate_mean, baseline_mean, candidate_variance + baseline_variance)


def _depth(tally: Tally) -> int:
    """Positions proposed at least once; a depth change between the two drafts must not look like a change of AL."""
    return sum(1 for proposed in tally.proposed if proposed)


def _moments(tally: Tally, depth: int) -> tuple[float, float]:
    """Mean accepted tokens over the first `depth` positions, and the variance of that mean.

    With L the accepted tokens of a step: E[L] = sum P(L > i), E[L^2] = sum (2i + 1) P(L > i).
    """
    rates = tally.rates()[:depth]
    mean = sum(rates)
    square = sum((2 * position + 1) * rate for position, rate in enumerate(rates))
    # A run of equal outcomes has no spread of its own; one unlike outcome in n is what it cannot exclude.
    spread = max(square - mean**2, 1.0 / tally.num_verify_steps)
    return mean, spread / tally.num_verify_steps
