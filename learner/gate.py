"""The gate: do the learner's weights beat the incumbent, do the last of them on what is asked now, and does no domain pay for it?

The first is a matter of evidence, which adds up over requests (`learner/wager.py`) and was gathered with the weights of their
time. The other two are asked of the very weights that would serve.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from statistics import median

from learner.config import GateSettings
from learner.evaluate import Score, simulated_al
from learner.gain import COMMON_SPREAD_AL, Gain, paired_gain
from learner.wager import Wager
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
    wager: Wager,
    candidate: Mapping[str, Score],
    incumbent: Mapping[str, Score],
    anchors: Callable[[], Sequence[AnchorScores]],
    settings: GateSettings,
    *,
    recount_level: float | None = None,
) -> GateReport:
    """The verdict on the evidence and on the newest unseen requests, guarded by the anchors of every domain. Scores are by request key.

    `candidate` are scores of the last weights where the wager is won; until then they may be of those that were there when a
    request came. With `recount_level` they are of the last weights too, and may themselves be the evidence: at that level, the
    chance that this one judgement errs. `anchors` is only called where all else speaks for the candidate: most rounds end before, and
    anchors are most of what there is to score. The AL it tells of both drafts is on the same requests.
    """
    gain = paired_gain(candidate, incumbent, num_resamples=settings.num_resamples)
    both = candidate.keys() & incumbent.keys()
    level = 1.0 - settings.confidence
    objection = _objection(wager, gain, settings, recount_level)
    worst = worst_domain(anchors(), settings) if objection is None else None
    if worst is not None and worst.is_certain_loss and worst.mean < -settings.max_anchor_drop:
        objection = f"anchors of {worst.domain} would lose {-worst.mean:.3f} AL, {settings.max_anchor_drop} is the most allowed"
    approval = (
        f"gain of {wager.gain:+.3f} AL on {wager.num_requests} requests, {gain.mean:+.3f} on the {gain.num_requests} newest"
        if wager.is_won
        else f"gain of {gain.mean:+.3f} AL on the {gain.num_requests} newest requests, asked again"
    )
    return GateReport(
        accepted=objection is None,
        reason=objection or approval,
        candidate_al=simulated_al([candidate[key] for key in both]),
        incumbent_al=simulated_al([incumbent[key] for key in both]),
        gain_low=gain.low(level),
        gain_high=gain.high(level),
        num_requests=gain.num_requests,
        worst_anchor_domain=None if worst is None else worst.domain,
        worst_anchor_change=0.0 if worst is None else worst.mean,
        evidence=wager.evidence,
        evidence_needed=wager.needed,
        num_counted=wager.num_requests,
        counted_gain=wager.gain,
    )


def worst_domain(anchors: Sequence[AnchorScores], settings: GateSettings) -> DomainChange | None:
    """The domain that loses most, certain losses first; None where none can be judged.

    Any of many domains may seem to lose by chance, so together they share the chance of one false veto: the first step of
    Holm (Scand. J. Stat. 6, 1979), which alone decides whether there is a veto. A veto needs no correction for repeated
    rounds: a false one only puts off what the next round may grant.
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


def _objection(wager: Wager, gain: Gain, settings: GateSettings, recount_level: float | None) -> str | None:
    is_sure = wager.is_won or (recount_level is not None and gain.low(recount_level) > 0)
    if not is_sure and recount_level is not None:
        return (
            f"no new request, and a gain of {gain.mean:+.3f} AL on the {gain.num_requests} newest, asked again, is not sure "
            f"(lower bound {gain.low(recount_level):+.3f})"
        )
    if not is_sure:
        return (
            f"gain of {wager.gain:+.3f} AL on {wager.num_requests} requests is not sure yet: "
            f"evidence {wager.evidence:.3g} of the {wager.needed:.0f} needed"
        )
    if gain.num_requests < settings.min_holdout_requests:
        return f"only {gain.num_requests} unseen requests, {settings.min_holdout_requests} are needed"
    if gain.mean < settings.min_gain:
        return (
            f"gain of {gain.mean:+.3f} AL on the {gain.num_requests} newest requests is below the {settings.min_gain} that pays "
            "for a swap, though the evidence suffices"
        )
    return None
