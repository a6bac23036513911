"""Trial: a short run at another K. Budget: how much of the decode time all trials together may cost."""

from __future__ import annotations

from dataclasses import dataclass

from server.depth.bucket import Bucket
from server.depth.readings import Steps

TRIAL_STEPS = 24
TRIAL_DEADLINE_S = 10.0
"""For its steps to run: its bucket may see no traffic any more."""

SHARE = 0.01
"""Of the decode time, that trials may lose."""
FIRST_CREDIT_S = 2.0
MAX_CREDIT_S = 5.0


@dataclass(slots=True)
class Trial:
    """In progress."""

    bucket: Bucket
    depth: int
    baseline_s: float
    """Mean step time of the K in force right before."""
    started_at_s: float
    reason: str
    num_steps: int = 0
    total_s: float = 0.0

    def take(self, steps: Steps) -> None:
        self.num_steps += steps.num_steps
        self.total_s += steps.total_s

    def is_over(self, now_s: float) -> bool:
        return self.num_steps >= TRIAL_STEPS or now_s - self.started_at_s > TRIAL_DEADLINE_S


class Budget:
    """Decode time earns credit, slower trials spend it."""

    def __init__(self) -> None:
        self._credit_s = FIRST_CREDIT_S
        self.lost_s = 0.0

    def earn(self, decode_s: float) -> None:
        self._credit_s = min(self._credit_s + SHARE * decode_s, MAX_CREDIT_S)

    def affords(self, loss_s: float) -> bool:
        return loss_s <= self._credit_s

    def spend(self, loss_s: float) -> None:
        self._credit_s -= loss_s
        self.lost_s += loss_s
