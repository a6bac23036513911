"""The gate: does a candidate beat the incumbent on requests neither was trained on, and does no domain pay for it?

Both drafts are scored on the same requests, so the bootstrap is paired: it resamples requests, and each keeps its pair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
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


_SEED = 0
_NO_GAIN = Gain(0.0, 0.0, 0.0, 0)


@dataclass(frozen=True)
class AnchorScores:
    """Anchors of one domain under both drafts, by request key."""

    domain: str
    candidate: Mapping[str, Score]
    incumbent: Mapping[str, Score]

    @property
    def keys(self) -> Set[str]:
        """Requests scored under both."""
        return self.candidate.keys() & self.incumbent.keys()


def paired_gain(
    candidate: Mapping[str, Score], incumbent: Mapping[str, Score], *, confidence: float, num_resamples: int
) -> Gain:
    """Gain of candidate over incumbent on the requests both were scored on; all zero with fewer than two."""
    keys = sorted(candidate.keys() & incumbent.keys())
    if len(keys) < 2:
        return Gain(0.0, 0.0, 0.0, len(keys))
    change = np.array([candidate[key].total_length - incumbent[key].total_length for key in keys])
    anchors = np.array([candidate[key].num_anchors for key in keys], dtype=np.float64)
    picks = np.random.default_rng(_SEED).integers(0, len(keys), size=(num_resamples, len(keys)))
    resampled = change[picks].sum(axis=1) / anchors[picks].sum(axis=1)
    low, high = np.quantile(resampled, [1 - confidence, confidence])
    return Gain(float(change.sum() / anchors.sum()), float(low), float(high), len(keys))


def decide(
    candidate: Mapping[str, Score],
    incumbent: Mapping[str, Score],
    anchors: Sequence[AnchorScores],
    settings: GateSettings,
) -> GateReport:
    """The verdict on recent held-out requests, guarded by the anchors of every domain. Scores are by request key."""
    gain = paired_gain(candidate, incumbent, confidence=settings.confidence, num_resamples=settings.num_resamples)
    worst_domain, worst = worst_anchor(anchors, settings)
    accepted, reason = _verdict(gain, worst_domain, worst, settings)
    return GateReport(
        accepted=accepted,
        reason=reason,
        candidate_al=simulated_al(candidate.values()),
        incumbent_al=simulated_al(incumbent.values()),
        gain_low=gain.low,
        gain_high=gain.high,
        num_requests=gain.num_requests,
        worst_anchor_domain=worst_domain,
        worst_anchor_change=worst.mean,
    )


def worst_anchor(anchors: Sequence[AnchorScores], settings: GateSettings) -> tuple[str | None, Gain]:
    """The domain that loses most, certain losses first, and its change; (None, no change) where none can be judged.

    Any one of many domains may seem to lose by chance, so they share the chance of one false veto.
    """
    judged = [scores for scores in anchors if len(scores.keys) >= settings.min_holdout_requests]
    gains = {
        scores.domain: paired_gain(
            scores.candidate,
            scores.incumbent,
            confidence=1 - (1 - settings.confidence) / len(judged),
            num_resamples=settings.num_resamples,
        )
        for scores in judged
    }
    worst = min(gains, key=lambda domain: (gains[domain].high >= 0, gains[domain].mean), default=None)
    return (None, _NO_GAIN) if worst is None else (worst, gains[worst])


def _verdict(gain: Gain, worst_domain: str | None, worst: Gain, settings: GateSettings) -> tuple[bool, str]:
    if gain.num_requests < settings.min_holdout_requests:
        return False, f"only {gain.num_requests} held-out requests, {settings.min_holdout_requests} are needed"
    if not gain.low > 0:
        return False, f"gain of {gain.mean:+.3f} AL is not significant (lower bound {gain.low:+.3f})"
    if gain.mean < settings.min_gain:
        return False, f"gain of {gain.mean:+.3f} AL is below the {settings.min_gain} that pays for a swap"
    if worst.high < 0 and worst.mean < -settings.max_anchor_drop:
        return (
            False,
            f"anchors of {worst_domain} would lose {-worst.mean:.3f} AL, {settings.max_anchor_drop} is the most allowed",
        )
    return True, f"gain of {gain.mean:+.3f} AL on {gain.num_requests} held-out requests (lower bound {gain.low:+.3f})"
