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
        depth = min(map(_depth, batches), default=0)
        if len(batches) < 2 or depth == 0:
            continue
        rates = total(batches).rates()[:depth]
        excess += sum(
            (sum(batch.rates()[:depth]) - sum(rates)) ** 2 / variance_of_mean(rates, batch.proposed) for batch in batches
        )
        num_free += len(batches) - 1
    return max(excess / num_free, 1.0)


def _compare(candidate: Tally, baseline: Tally) -> _Comparison:
    depth = min(_depth(candidate), _depth(baseline))
    means = [sum(tally.rates()[:depth]) for tally in (candidate, baseline)]
    # By the rates of both together, as if they were alike: a few steps that went one way by chance would seem to have no spread.
    rates = (candidate + baseline).rates()[:depth]
    variance = variance_of_mean(rates, candidate.proposed) + variance_of_mean(rates, baseline.proposed)
    return _Comparison(candidate.num_verify_steps, means[0], means[1], variance)


def _depth(tally: Tally) -> int:
    """Positions proposed often enough to be compared; a depth change between the two drafts must not look like a change of AL."""
    enough = min(MIN_BASELINE_STEPS, max(tally.proposed, default=0))
    return sum(1 for proposed in tally.proposed if proposed and proposed >= enough)


def variance_of_mean(rates: Sequence[float], proposed: Sequence[int]) -> float:
    """Of the sum of `rates`, the mean accepted tokens of a step, where position i was proposed in `proposed[i]` steps.

    With L the accepted tokens: E[L] = sum P(L > i), and of positions i < j, where the deeper one's n_j steps are among the other's n_i,
    Cov = P(L > j) (1 - P(L > i)) / n_i. Where all n are alike this is Var(L) / n.
    """
    variance = 0.0
    for position, (rate, num_steps) in enumerate(zip(rates, proposed, strict=False)):
        # A run of equal outcomes has no spread of its own; one unlike outcome in n is what it cannot exclude.
        own = max(rate * (1.0 - rate), 1.0 / num_steps)
        variance += (own + 2.0 * (1.0 - rate) * sum(rates[position + 1 :])) / num_steps
    return variance
