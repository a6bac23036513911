"""Survival: how likely the draft's proposals are accepted down to each position. Pure; forgets what is old."""

from __future__ import annotations

from math import log, sqrt

from server.depth.estimate import Estimate
from server.tally import Tally

FIRST_SHARE = 0.25
NEXT_SHARE = 0.6
"""What is assumed of a position that nothing is known of: this share, or this share of the position before."""
ASSUMED_STEPS = 2.0
"""Verify steps that the assumption is worth."""
HALF_LIFE_STEPS = 1000.0
"""Verify steps after which a verdict counts half."""
STEPS_ALIKE = 4.0
"""Verify steps that tell as much as one independent one: those of one request are alike."""
DRIFT_PER_S = 0.1**2 / 240
"""Variance that a share gains while nothing is proposed at its position: traffic changes."""


class Survival:
    """P(more than i proposals are accepted) for each position i, of the draft now active.

    Beta-binomial: the posterior of `accepted` out of `proposed`, with a prior that follows the position before.
    """

    def __init__(self, max_depth: int) -> None:
        self._version: int | None = None
        self._proposed = [0.0] * max_depth
        self._accepted = [0.0] * max_depth
        self.seen_s: list[float | None] = [None] * max_depth
        """When this draft's proposals at each position were last verified."""

    def observe(self, version: int, tally: Tally, now_s: float) -> None:
        """Add verify steps. A new draft inherits no more than a suspicion of how good it is."""
        if version != self._version:
            self._version = version
            self.forget()
        counts = zip(tally.proposed, tally.accepted, strict=False)
        for position, (num_proposed, num_accepted) in enumerate(counts):
            if position < len(self._proposed) and num_proposed:
                keep = 0.5 ** (num_proposed / HALF_LIFE_STEPS)
                fresh = HALF_LIFE_STEPS / log(2.0) * (1.0 - keep)  # of many at once the first are old already
                self._proposed[position] = self._proposed[position] * keep + fresh
                self._accepted[position] = self._accepted[position] * keep + fresh * num_accepted / num_proposed
                self.seen_s[position] = now_s

    def forget(self) -> None:
        """Another draft, or another target: no more than a suspicion is left."""
        for position, num_proposed in enumerate(self._proposed):
            keep = min(1.0, ASSUMED_STEPS * STEPS_ALIKE / num_proposed) if num_proposed else 0.0
            self._proposed[position] *= keep
            self._accepted[position] *= keep
        self.seen_s = [None] * len(self.seen_s)

    def num_proposed(self, position: int) -> float:
        """Recent proposals that the share at this position rests on."""
        return self._proposed[position]

    def shares(self, now_s: float) -> list[Estimate]:
        shares: list[Estimate] = []
        before = Estimate(1.0, 0.0)
        for position, seen_s in enumerate(self.seen_s):
            assumed = before.mean * (NEXT_SHARE if position else FIRST_SHARE)
            num_steps = self._proposed[position] / STEPS_ALIKE
            num_accepted = self._accepted[position] / STEPS_ALIKE
            share = (num_accepted + ASSUMED_STEPS * assumed) / (num_steps + ASSUMED_STEPS)
            share = min(share, before.mean)
            variance = share * (1.0 - share) / (num_steps + ASSUMED_STEPS + 1.0)
            if seen_s is not None:
                variance += DRIFT_PER_S * max(now_s - seen_s, 0.0)
            before = Estimate(share, min(sqrt(variance), before.mean + before.deviation))
            shares.append(before)
        return shares


def expected_tokens(shares: list[Estimate], depth: int) -> float:
    """Tokens one request emits in a verify step of this depth: 1 + sum of P(more than i accepted) over i < depth."""
    return 1.0 + sum(share.mean for share in shares[:depth])
