"""How the machine is divided: units (cores, shares of a core, or replicas) of users, rollouts, trainer and learner."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from pydantic import model_validator

from wire.config import Config

Lane = Literal["users", "rollouts", "trainer", "learner"]
LANES: tuple[Lane, ...] = ("users", "rollouts", "trainer", "learner")


@dataclass(frozen=True, slots=True)
class Split:
    """Units of each lane."""

    users: int
    rollouts: int
    trainer: int
    learner: int

    @property
    def total(self) -> int:
        return sum(self.of(lane) for lane in LANES)

    def of(self, lane: Lane) -> int:
        units: int = getattr(self, lane)
        return units

    def moved(self, giver: Lane, taker: Lane, num_units: int = 1) -> Split:
        """The split after the giver's units went to the taker."""
        return replace(self, **{giver: self.of(giver) - num_units, taker: self.of(taker) + num_units})


class SplitLimits(Config):
    """What each lane has at least and at most. The users' least is never taken, whatever the need."""

    least: Split
    most: Split

    @model_validator(mode="after")
    def _is_possible(self) -> SplitLimits:
        if self.least.rollouts < 1 or self.least.trainer < 1:
            raise ValueError(f"rollouts and trainer need a unit each, least gives {self.least}")
        for lane in LANES:
            if not 0 <= self.least.of(lane) <= self.most.of(lane):
                raise ValueError(
                    f"{lane} would have at least {self.least.of(lane)} and at most {self.most.of(lane)} units; "
                    "least is 0 or more and no more than most"
                )
        return self

    def allow(self, split: Split) -> bool:
        return all(self.least.of(lane) <= split.of(lane) <= self.most.of(lane) for lane in LANES)

    def can_move(self, split: Split, giver: Lane, taker: Lane, num_units: int = 1) -> bool:
        return giver != taker and self.allow(split.moved(giver, taker, num_units))
