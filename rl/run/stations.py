"""How long the stations of a step took, one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable


class Stations:
    """clock: any that does not go back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_s = clock()
        self._seconds: dict[str, float] = {}

    def end(self, name: str) -> None:
        """What came since the last station's end was this one."""
        now_s = self._clock()
        self._seconds[name] = now_s - self._last_s
        self._last_s = now_s

    def seconds(self, name: str) -> float:
        """0 for one that was left out."""
        return self._seconds.get(name, 0.0)
