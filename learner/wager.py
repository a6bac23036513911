"""Wager: evidence that a draft is better than another one, counted request by request, and valid whenever one looks at it.

Each request both drafts are unseen to changes AL by x, at most CLIP either way. Starting from 1, the wealth of someone who bets
that x is positive is multiplied by 1 + bet * x, and each bet is chosen before its request is scored. While no draft is better
(the mean of x, given all before, is at most 0) the wealth is a supermartingale, so the chance that it ever reaches 1 / level is at
most `level` (Ville), however often one looks and whichever draft each request met: its owner may go on training in between
(testing by betting: Shafer, JRSS A 184, 2021; Waudby-Smith & Ramdas, JRSS B 86, 2024, sec. 4; x need only be bounded).

The bet is the growth-optimal one to first order, mean / mean square (their "aGRAPA", appendix B), of what was seen so far. Three
things keep old evidence from masking new:
- mean and mean square look back on some 64 requests, but on 16 from where the mean falls to 0, below which it does not go, so that a
  draft which loses in one domain is bet on at once when it gains in the next;
- wealth stops growing at what is needed, so that a loss later brings it below that at once;
- where most is lost, the stake is replaced, from that request on. Stake k has a share 1 / (k (k + 1)) of the level, which add up to 1.
"""

from __future__ import annotations

import math

from msgspec import Struct

CLIP = 1.0
"""AL by which one request may change at most; a larger change counts as this."""
_LARGEST_LOSS = 0.9
"""Share of the wealth that one request can cost."""
_FULL_ANCHORS = 16
"""A request of fewer judged anchors counts for as much less: its change is mostly chance."""
_FIRST_MEAN_SQUARE = 0.15**2
"""What that of a change is taken for before the first one: 0.15 AL is by which requests commonly differ."""
_LEAST_MEAN_SQUARE = 1e-3
_SHORTEST_MEMORY, _LONGEST_MEMORY = 16, 64
_REPLACED_BELOW = 0.25


class Wager(Struct):
    """`level`: the chance with which it may ever be won for a draft that is not better."""

    level: float
    stake: int = 1
    """Which one it is, from 1."""
    log_wealth: float = 0.0
    mean: float = 0.0
    mean_square: float = _FIRST_MEAN_SQUARE
    memory: int = _SHORTEST_MEMORY
    """Requests that mean and mean square are taken over."""
    num_requests: int = 0
    """All that were counted, by earlier stakes too."""
    total_change: float = 0.0
    total_weight: float = 0.0

    @property
    def evidence(self) -> float:
        """The wealth, times what was staked: an e-value."""
        return math.exp(self.log_wealth)

    @property
    def needed(self) -> float:
        """The evidence that wins."""
        return self.stake * (self.stake + 1) / self.level

    @property
    def is_won(self) -> bool:
        return self.log_wealth >= math.log(self.needed)

    @property
    def gain(self) -> float:
        """Mean change of AL over the requests that were counted; 0 before the first."""
        return self.total_change / self.total_weight if self.total_weight else 0.0

    def count(self, change: float, num_anchors: int) -> None:
        """The change of AL on one more request, over that many judged anchors."""
        weight = min(num_anchors / _FULL_ANCHORS, 1.0)
        x = weight * max(-CLIP, min(change, CLIP))
        self.log_wealth = min(self.log_wealth + math.log1p(self._bet() * x), math.log(self.needed))
        self._learn(x)
        self.num_requests += 1
        self.total_change += weight * change
        self.total_weight += weight
        if self.log_wealth < math.log(_REPLACED_BELOW):
            self.log_wealth = 0.0
            self.stake += 1

    def _bet(self) -> float:
        return min(self.mean / self.mean_square, _LARGEST_LOSS / CLIP)

    def _learn(self, x: float) -> None:
        self.memory = min(self.memory + 1, _LONGEST_MEMORY)
        self.mean += (x - self.mean) / self.memory
        self.mean_square = max(self.mean_square + (x * x - self.mean_square) / self.memory, _LEAST_MEAN_SQUARE)
        if self.mean <= 0.0:
            self.mean, self.memory = 0.0, _SHORTEST_MEMORY
