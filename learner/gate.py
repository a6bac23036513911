"""The gate: does a candidate beat the incumbent on requests neither was trained on, and does no domain pay for it?

How sure it must be depends on how often it has looked at this incumbent (`learner/looks.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from statistics import median

from learner.config import GateSettings
from learner.evaluate import Score, simulated_al
from learner.gain import COMMON_SPREAD_AL, Gain, paired_gain
from learner.looks import level_of_look
from wire.artifact import GateReport

SMALL_DOMAINS = "small domains"
"""The name under which domains of too few anchors are judged together."""


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


@dataclass(frozen=True)
class DomainChange:
    """The change of AL on the anchors of one domain."""

    domain: str
    mean: float
    is_certain_loss: bool
    """Whether chance does not explain it."""


def decide(
    candidate: Mapping[str, Score],
    incumbent: Mapping[str, Score],
    anchors: Callable[[], Sequence[AnchorScores]],
    settings: GateSettings,
    *,
    look: int,
) -> GateReport:
    """The verdict on the newest unseen requests, guarded by the anchors of every domain. Scores are by request key.

    `look` counts the looks at this incumbent from 1. `anchors` is only called where the requests speak for the candidate:
    most looks end before, and anchors are most of what there is to score.
    """
    gain = paired_gain(candidate, incumbent, num_resamples=settings.num_resamples)
    level = level_of_look(look, settings)
    objection = _objection(gain, level, settings)
    worst = worst_domain(anchors(), settings) if objection is None else None
    if worst is not None and worst.is_certain_loss and worst.mean < -settings.max_anchor_drop:
        objection = f"anchors of {worst.domain} would lose {-worst.mean:.3f} AL, {settings.max_anchor_drop} is the most allowed"
    approval = f"gain of {gain.mean:+.3f} AL on {gain.num_requests} unseen requests (lower bound {gain.low(level):+.3f})"
    return GateReport(
        accepted=objection is None,
        reason=objection or approval,
        candidate_al=simulated_al(candidate.values()),
        incumbent_al=simulated_al(incumbent.values()),
        gain_low=gain.low(level),
        gain_high=gain.high(level),
        num_requests=gain.num_requests,
        worst_anchor_domain=None if worst is None else worst.domain,
        worst_anchor_change=0.0 if worst is None else worst.mean,
        look=look,
    )


def worst_domain(anchors: Sequence[AnchorScores], settings: GateSettings) -> DomainChange | None:
    """The domain that loses most, certain losses first; None where none can be judged.

    Any of many domains may seem to lose by chance, so together they share the chance of one false veto: the first step of
    Holm (Scand. J. Stat. 6, 1979), which alone decides whether there is a veto. A veto needs no correction for repeated
    looks: a false one only puts off what the next look may grant.
    """
    judged = {
        scores.domain: paired_gain(scores.candidate, scores.incumbent, num_resamples=settings.num_resamples)
        for scores in _with_small_ones_pooled(anchors, settings.min_holdout_requests)
    }
    prior = _common_spread(judged.values())
    level = (1.0 - settings.confidence) / max(len(judged), 1)
    changes = [
        DomainChange(domain, gain.mean, replace(gain, prior_spread=prior).high(level) < 0) for domain, gain in judged.items()
    ]
    return min(changes, key=lambda change: (not change.is_certain_loss, change.mean), default=None)


def _common_spread(gains: Collection[Gain]) -> float:
    """By which requests of one domain differ in most domains; the few anchors of a single one tell little of it."""
    return max(median([gain.spread for gain in gains] or [0.0]), COMMON_SPREAD_AL)


def _with_small_ones_pooled(anchors: Sequence[AnchorScores], min_requests: int) -> list[AnchorScores]:
    """Domains of at least `min_requests`, and the others together as one where they are as many."""
    large = [scores for scores in anchors if len(scores.keys) >= min_requests]
    small = [scores for scores in anchors if len(scores.keys) < min_requests]
    pool = AnchorScores(
        SMALL_DOMAINS,
        {key: score for scores in small for key, score in scores.candidate.items()},
        {key: score for scores in small for key, score in scores.incumbent.items()},
    )
    return [*large, pool] if len(pool.keys) >= min_requests else large


def _objection(gain: Gain, level: float, settings: GateSettings) -> str | None:
    if gain.num_requests < settings.min_holdout_requests:
        return f"only {gain.num_requests} unseen requests, {settings.min_holdout_requests} are needed"
    if not gain.low(level) > 0:
        return f"gain of {gain.mean:+.3f} AL is not significant (lower bound {gain.low(level):+.3f})"
    if gain.mean < settings.min_gain:
        return f"gain of {gain.mean:+.3f} AL is below the {settings.min_gain} that pays for a swap"
    return None
