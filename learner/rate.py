"""Rate: amounts per second over a sliding window, read from any thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable


class Rate:
    """Of the latest 10 000 amounts at most."""

    def __init__(self, window_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._window_s = window_s
        self._clock = clock
        self._amounts: deque[tuple[float, float]] = deque(maxlen=10_000)

    def add(self, amount: float) -> None:
        self._amounts.append((self._clock(), amount))

    def per_s(self) -> float:
        """What was added within the window, over its whole length."""
        since_s = self._clock() - self._window_s
        return sum(amount for at_s, amount in list(self._amounts) if at_s >= since_s) / self._window_s
