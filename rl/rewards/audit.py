"""The rule's audit of the reward model: where they disagree more than they should, somebody is being deceived.

A rule is right when it says "right", and may miss right answers written in ways it does not know. So an answer the rule accepts and the
model refuses is the model's mistake; one the model accepts and the rule refuses is either the rule's, or a policy that has found out
what the model likes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from msgspec import Struct

_Z = 2.576
"""An alarm has 99 % on its side (one in 200 where nothing is the matter)."""


class Verdict(Struct, frozen=True):
    """On one answer."""

    is_right: bool
    """By the rule."""
    score: float
    """Of the model, which accepts from 0.5 on."""


class Audit(Struct, frozen=True, kw_only=True, tag="reward_audit"):
    num_verdicts: int
    accepted_wrong: float
    """Of the answers the model accepts, the share the rule refuses; 0 where it accepts none."""
    refused_right: float
    """Of the answers the rule accepts, the share the model refuses; 0 where it accepts none."""
    score_gap: float | None
    """Mean score of what the rule accepts less that of what it refuses; None where one of them is empty."""
    alarms: tuple[str, ...]


def audit(verdicts: Sequence[Verdict], limit: float) -> Audit:
    """Of a window of verdicts, a few hundred say most. limit: the largest share without an alarm."""
    accepted = [not verdict.is_right for verdict in verdicts if verdict.score >= 0.5]
    right = [verdict.score < 0.5 for verdict in verdicts if verdict.is_right]
    found = []
    if _surely_above(accepted, limit):
        found.append(
            f"the rule refuses {sum(accepted)} of {len(accepted)} answers the reward model accepts: read some of them; if they are "
            "wrong the policy deceives the model: lower its weight, or train it on them as negatives"
        )
    if _surely_above(right, limit):
        found.append(
            f"the reward model refuses {sum(right)} of {len(right)} answers the rule accepts: it lags behind the policy; more "
            "updates per step, or a higher rate"
        )
    return Audit(
        num_verdicts=len(verdicts),
        accepted_wrong=_share(accepted),
        refused_right=_share(right),
        score_gap=_gap(verdicts),
        alarms=tuple(found),
    )


def _share(hits: Sequence[bool]) -> float:
    return sum(hits) / len(hits) if hits else 0.0


def _surely_above(hits: Sequence[bool], limit: float) -> bool:
    """Whether the lower end of Wilson's interval of the share is above the limit."""
    n = len(hits)
    if n == 0:
        return False
    share = _share(hits)
    centre = share + _Z**2 / (2 * n)
    margin = _Z * sqrt(share * (1 - share) / n + _Z**2 / (4 * n**2))
    return (centre - margin) / (1 + _Z**2 / n) > limit


def _gap(verdicts: Sequence[Verdict]) -> float | None:
    right = [verdict.score for verdict in verdicts if verdict.is_right]
    wrong = [verdict.score for verdict in verdicts if not verdict.is_right]
    return sum(right) / len(right) - sum(wrong) / len(wrong) if right and wrong else None
