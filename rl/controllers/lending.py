"""What users lend: a unit above their least while they do not need it, given back the moment they do.

A unit that was lent and soon called back was lent too early: each such time doubles how long users must be calm before the next
loan, so users whose load flaps lend ever more rarely (exponential back-off, Metcalfe and Boggs 1976).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rl.controllers.reading import believable

PRESSED = 0.9
"""Busy share of their units from which users need one more, as does any request that waits."""
CALM = 0.6
"""They are calm where one unit less would be no busier than this; the gap to PRESSED is the hysteresis."""
FIRST_PATIENCE, MAX_PATIENCE = 4, 64
"""Update intervals."""


@dataclass(frozen=True, slots=True)
class Lending:
    patience: int = FIRST_PATIENCE
    """Calm update intervals in a row before a unit is lent."""
    num_calm: int = 0
    is_lent: bool = False
    """A unit was lent and has not yet proved to be spare."""

    @property
    def may_lend(self) -> bool:
        return self.num_calm >= self.patience

    def observe(self, units: int, busy: float | None, num_queued: float | None) -> tuple[Lending, bool]:
        """The state after one reading, and whether users need a unit now. Whom nothing is known of lends nothing."""
        queued = believable(num_queued)
        load = believable(busy)
        if queued or (load is not None and load >= PRESSED):
            patience = min(2 * self.patience, MAX_PATIENCE) if self.is_lent else self.patience
            return Lending(patience), True
        is_calm = queued == 0.0 and load is not None and units > 0 and load * units <= CALM * (units - 1)
        if not is_calm:
            return replace(self, num_calm=0), False
        after = replace(self, num_calm=self.num_calm + 1)
        if after.is_lent and after.may_lend:
            after = replace(after, patience=max(self.patience // 2, FIRST_PATIENCE), is_lent=False)
        return after, False

    def lent(self) -> Lending:
        return replace(self, num_calm=0, is_lent=True)
