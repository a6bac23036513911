"""The gate: does a candidate beat the incumbent on requests neither was trained on, and does no domain pay for it?

Both drafts are scored on the same requests, so the bootstrap is paired: it resamples requests, and each keeps its pair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from learner.config import GateSettings
from learner.evaluate import Score, simulated_al
from wire.artifact import GateReport


@dataclass(frozen=True)
class Gain:
    """Difference in simulated AL, and the ends of its two-sided interval at twice the one-sided level."""

    mean: float
    low: float
    high: float
    num_requests: int


def paired_gain(
    candidate: Mapping[str, Score], incumbent: Mapping[str, Score], *, confidence: float, num_resamples: int, seed: int = 0
) -> Gain:
    """Gain of candidate over incumbent on the requests both were scored on; all zero with fewer than two."""
    keys = sorted(candidate.keys() & incumbent.keys())
    if len(keys) < 2:
        return Gain(0.0, 0.0, 0.0, len(keys))
    change = np.array([candidate[key].total_length - incumbent[key].total_length for key in keys])
    anchors = np.array([candidate[key].num_anchors for key in keys], dtype=np.float64)
    picks = np.random.default_rng(seed).integers(0, len(keys), size=(num_resamples, len(keys)))
    resampled = change[picks].sum(axis=1) / anchors[picks].sum(axis=1)
    low, high = np.quantile(resampled, [1 - confidence, confidence])
    return Gain(float(change.sum() / anchors.sum()), float(low), float(high), len(keys))


def decide(
    candidate: Sequence[Score],
    incumbent: Sequence[Score],
    candidate_anchors: Sequence[Score],
    incumbent_anchors: Sequence[Score],
    settings: GateSettings,
) -> GateReport:
    """The verdict on recent held-out requests, guarded by the anchors of every domain."""
    gain = paired_gain(
        {score.key: score for score in candidate},
        {score.key: score for score in incumbent},
        confidence=settings.confidence,
        num_resamples=settings.num_resamples,
    )
    worst_domain, worst_change = worst_anchor(candidate_anchors, incumbent_anchors)
    accepted, reason = _verdict(gain, worst_domain, worst_change, settings)
    return GateReport(
        accepted=accepted,
        reason=reason,
        candidate_al=simulated_al(candidate),
        incumbent_al=simulated_al(incumbent),
        gain_low=gain.low,
        gain_high=gain.high,
        num_requests=gain.num_requests,
        worst_anchor_domain=worst_domain,
        worst_anchor_change=worst_change,
    )


def worst_anchor(candidate: Sequence[Score], incumbent: Sequence[Score]) -> tuple[str | None, float]:
    """The domain whose anchors lose most (or gain least), and by how much simulated AL; (None, 0.0) without anchors."""
    changes = {}
    for group in sorted({score.group for score in incumbent}):
        after = simulated_al([score for score in candidate if score.group == group])
        before = simulated_al([score for score in incumbent if score.group == group])
        changes[group] = after - before
    if not changes:
        return None, 0.0
    worst = min(changes, key=lambda group: changes[group])
    return worst, changes[worst]


def _verdict(gain: Gain, worst_domain: str | None, worst_change: float, settings: GateSettings) -> tuple[bool, str]:
    if gain.num_requests < settings.min_holdout_requests:
        return False, f"only {gain.num_requests} held-out requests, {settings.min_holdout_requests} are needed"
    if not gain.low > 0:
        return False, f"gain of {gain.mean:+.3f} AL is not significant (lower bound {gain.low:+.3f})"
    if gain.mean < settings.min_gain:
        return False, f"gain of {gain.mean:+.3f} AL is below the {settings.min_gain} that pays for a swap"
    if worst_change < -settings.max_anchor_drop:
        return (
            False,
            f"anchors of {worst_domain} would lose {-worst_change:.3f} AL, {settings.max_anchor_drop} is the most allowed",
        )
    return True, f"gain of {gain.mean:+.3f} AL on {gain.num_requests} held-out requests (lower bound {gain.low:+.3f})"
