"""Tally: acceptance counts that add, subtract and tell their mean and spread. Pure numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise, zip_longest


@dataclass(frozen=True, slots=True)
class Tally:
    """Verify steps, and per draft position how many tokens were proposed and accepted.

    Acceptance is a prefix, so `accepted[i]` is the number of steps that accepted more than `i` tokens.
    """

    num_verify_steps: int = 0
    proposed: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.num_verify_steps + other.num_verify_steps,
            _combine(self.proposed, other.proposed, 1),
            _combine(self.accepted, other.accepted, 1),
        )

    def __sub__(self, other: Tally) -> Tally:
        return Tally(
            self.num_verify_steps - other.num_verify_steps,
            _combine(self.proposed, other.proposed, -1),
            _combine(self.accepted, other.accepted, -1),
        )

    @property
    def is_possible(self) -> bool:
        """False for a difference of counters that went backwards, or of two histories: deeper positions have no more, and none more
        accepted than proposed."""
        deepest_last = [(self.num_verify_steps, *self.proposed, 0), (*self.accepted, 0)]
        is_prefix = all(deeper <= count for counts in deepest_last for count, deeper in pairwise(counts))
        pairs = zip_longest(self.accepted, self.proposed, fillvalue=0)
        return is_prefix and all(accepted <= proposed for accepted, proposed in pairs)

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted)

    @property
    def num_emitted(self) -> int:
        """Tokens emitted by these verify steps."""
        return self.num_verify_steps + self.num_accepted

    @property
    def acceptance_length(self) -> float:
        """AL: tokens emitted per verify step; 1.0 when nothing was measured."""
        return self.num_emitted / self.num_verify_steps if self.num_verify_steps else 1.0

    def rates(self) -> list[float]:
        """Accepted share of the proposals at each position, as far as any were made."""
        pairs = zip_longest(self.accepted, self.proposed, fillvalue=0)
        return [accepted / proposed for accepted, proposed in pairs if proposed]


def total(tallies: Iterable[Tally]) -> Tally:
    return sum(tallies, Tally())


def _combine(left: tuple[int, ...], right: tuple[int, ...], sign: int) -> tuple[int, ...]:
    return tuple(a + sign * b for a, b in zip_longest(left, right, fillvalue=0))
