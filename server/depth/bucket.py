"""Bucket: batches of like size on one engine: their K, what their steps cost, and how they ran lately."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from math import exp

from server.depth.costs import StepCosts
from server.depth.readings import Steps

BASELINE_STEPS = 24
"""Steps at the K in force that another K is compared with."""
BASELINE_AGE_S = 60.0
"""Older ones say nothing of how fast the machine is now."""


class Bucket:
    """`limit` is the largest batch size in it."""

    def __init__(self, limit: int, depth: int) -> None:
        self.limit = limit
        self.depth = depth
        """K in force, a trial left out."""
        self.reason = "as the engine started"
        self.costs: StepCosts | None = None
        """None until two K were compared here."""
        self.num_steps: Counter[int] = Counter()
        """Timed, by K."""
        self.total_s: defaultdict[int, float] = defaultdict(float)
        """Of these steps."""
        self.seen_s: float | None = None
        """When steps were last timed here."""
        self.challenger: tuple[int, int] = (depth, 0)
        """The K that is better by all that is known, and for how many readings it has been so."""
        self.step_s: float | None = None
        """Of the K in force, recently."""
        self._recent: deque[tuple[float, Steps]] = deque()

    def take(self, depth: int, steps: Steps, now_s: float) -> None:
        """Steps timed at one K."""
        self.num_steps[depth] += steps.num_steps
        self.total_s[depth] += steps.total_s
        self.seen_s = now_s
        if depth == self.depth:
            self._recent.append((now_s, steps))
            while self._count() - self._recent[0][1].num_steps >= BASELINE_STEPS:
                self._recent.popleft()
            self.step_s = self.baseline_s(now_s) or self.step_s

    def baseline_s(self, now_s: float) -> float | None:
        """Mean step time at the K in force just now; None where too little ran since the last trial or change."""
        while self._recent and now_s - self._recent[0][0] > BASELINE_AGE_S:
            self._recent.popleft()
        num_steps = self._count()
        return sum(steps.total_s for _, steps in self._recent) / num_steps if num_steps >= BASELINE_STEPS else None

    def forget_baseline(self) -> None:
        self._recent.clear()

    def change(self, depth: int, reason: str) -> None:
        """Another K is in force from now on."""
        if self.costs is not None and self.step_s is not None:
            self.step_s *= exp(self.costs.log_ratio(depth, self.depth).mean)
        self.depth, self.reason, self.challenger = depth, reason, (depth, 0)
        self.forget_baseline()

    def _count(self) -> int:
        return sum(steps.num_steps for _, steps in self._recent)
