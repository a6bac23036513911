"""The rule and the reward model watch each other: where they disagree more than they should, somebody is being deceived.

An answer the model accepts and the rule refuses is one the rule does not know, or the work of a policy that has found out what the
model likes. One the rule accepts and the model refuses is one the model does not know yet, or the work of a policy that has found a hole in
the rule. And a rule that accepts an answer whatever is put in its place does not read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import sqrt

from msgspec import Struct

UNDECIDED = 0.5
"""Score of what the model knows nothing of. It accepts what is above and refuses what is below."""
_Z = 2.576
"""An alarm has 99 % on its side (one in 200 where nothing is the matter)."""


class Verdict(Struct, frozen=True):
    """On one answer."""

    is_right: bool
    """By the rule."""
    score: float
    """Of the model."""


class Audit(Struct, frozen=True, kw_only=True, tag="reward_audit"):
    """Counts of answers, which add up over steps."""

    num_right: int = 0
    """That the rule accepts, among those on which the model has a verdict."""
    num_wrong: int = 0
    num_refused_right: int = 0
    """Of the right ones, those the model refuses."""
    num_accepted_wrong: int = 0
    """Of the wrong ones, those the model accepts."""
    sum_right_scores: float = 0.0
    sum_wrong_scores: float = 0.0
    num_changed: int = 0
    """Right ones in which the answer could be changed to another one, and the rule was asked about it."""
    num_unread: int = 0
    """Of them, those the rule still accepted whatever it was changed to."""

    def __add__(self, other: Audit) -> Audit:
        return Audit(**{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__})

    @property
    def num_accepted(self) -> int:
        """By the model."""
        return self.num_right - self.num_refused_right + self.num_accepted_wrong

    @property
    def num_verdicts(self) -> int:
        """Of the model, that are beside one of the rule's. None: it knows nothing yet, or no environment has a right answer in words."""
        return self.num_right + self.num_wrong

    @property
    def disagreement(self) -> float:
        """Share of the verdicts; 0 where there are none."""
        return _share(self.num_refused_right + self.num_accepted_wrong, self.num_verdicts)

    @property
    def score_gap(self) -> float | None:
        """Mean score of what the rule accepts less that of what it refuses; None where one of them is empty."""
        if not (self.num_right and self.num_wrong):
            return None
        return self.sum_right_scores / self.num_right - self.sum_wrong_scores / self.num_wrong


def audit(verdicts: Iterable[Verdict]) -> Audit:
    decided = [verdict for verdict in verdicts if verdict.score != UNDECIDED]
    right = [verdict.score for verdict in decided if verdict.is_right]
    wrong = [verdict.score for verdict in decided if not verdict.is_right]
    return Audit(
        num_right=len(right),
        num_wrong=len(wrong),
        num_refused_right=sum(score < UNDECIDED for score in right),
        num_accepted_wrong=sum(score > UNDECIDED for score in wrong),
        sum_right_scores=sum(right),
        sum_wrong_scores=sum(wrong),
    )


def alarms(found: Audit, limit: float) -> Iterator[str]:
    """A sentence for each share that is above the limit for certain; a few hundred answers say most."""
    if _is_surely_above(found.num_accepted_wrong, found.num_accepted, limit):
        yield (
            f"the rule refuses {found.num_accepted_wrong} of {found.num_accepted} answers the reward model accepts: read some of them; "
            "if they are right the rule does not know how they are written: mend it; else the policy deceives the model: lower "
            "rl.reward_model.weight; where that is 0, the model lags behind: raise rl.reward_model.learning_rate"
        )
    if _is_surely_above(found.num_refused_right, found.num_right, limit):
        yield (
            f"the reward model refuses {found.num_refused_right} of {found.num_right} answers the rule accepts: read some of them; if "
            "they are wrong the policy has found a hole in the rule: mend it; else the model lags behind: raise "
            "rl.reward_model.learning_rate"
        )
    if _is_surely_above(found.num_unread, found.num_changed, limit):
        yield (
            f"the rule accepts {found.num_unread} of {found.num_changed} right answers even when another answer is put in their place: it "
            "does not read what it judges: read some of them, and mend it"
        )


def _share(hits: int, count: int) -> float:
    return hits / count if count else 0.0


def _is_surely_above(hits: int, count: int, limit: float) -> bool:
    """Whether the lower end of Wilson's interval of the share is above the limit."""
    if count == 0:
        return False
    share = _share(hits, count)
    centre = share + _Z**2 / (2 * count)
    margin = _Z * sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
    return (centre - margin) / (1 + _Z**2 / count) > limit
