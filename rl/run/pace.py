"""How far rollouts come between two updates, for the controller that gives up those which would be too old."""

from __future__ import annotations

import time
from collections.abc import Callable


class Pace:
    """Tokens one running rollout makes between two updates: its tokens a second, times the seconds from update to update.

    Both from requests that have ended, so that seats nobody sits in, and time in which the ledger admits no rollout, make none look slow.
    clock: any that does not go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._updated_s = clock()
        self._num_tokens, self._seat_s = 0, 0.0
        self._tokens_per_s: float | None = None

    def update(self, num_tokens: int, seat_s: float) -> float | None:
        """An update has happened. num_tokens, seat_s: of all ended requests so far. None: none has ended yet."""
        now_s = self._clock()
        interval_s, self._updated_s = now_s - self._updated_s, now_s
        if num_tokens > self._num_tokens and seat_s > self._seat_s:
            self._tokens_per_s = (num_tokens - self._num_tokens) / (seat_s - self._seat_s)
        self._num_tokens, self._seat_s = num_tokens, seat_s
        return None if self._tokens_per_s is None else self._tokens_per_s * interval_s
