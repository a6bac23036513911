"""What units bring: a lane's capacity at another number of units, by measurement where it has been there, else in proportion.

What is remembered are ratios of capacities, measured right before and right after a move. They belong to the machine: a load
that becomes heavier changes both sides of a ratio alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Scaling:
    relative: Mapping[int, float] = field(default_factory=dict)
    """Capacity by number of units, all against the same unknown one."""

    def capacity(self, units: int, *, now_units: int, now_capacity: float) -> float:
        """Tokens/s at `units`, given what `now_units` bring."""
        here, there = self.relative.get(now_units), self.relative.get(units)
        if here is not None and there is not None:
            return now_capacity * there / here
        return now_capacity * units / now_units

    def after_move(self, old: tuple[int, float], new: tuple[int, float]) -> Scaling:
        """Learn from a move between two (units, tokens/s), measured one right after the other, both above 0."""
        (old_units, old_capacity), (new_units, new_capacity) = old, new
        if old_units == new_units:
            return self
        anchor = self.relative.get(old_units, 1.0)
        known = self.relative if old_units in self.relative else {}
        return Scaling({**known, old_units: anchor, new_units: anchor * new_capacity / old_capacity})
