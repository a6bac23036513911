"""Breaker: keeps requests away from an engine that keeps failing them, for a growing but bounded time.

A probe finds an engine that is down. It does not find one that answers probes and drops requests, or that comes up and falls
again and again: every such engine would cost each request a move. Three states: closed (requests pass), open (none do), half
open (one at a time is tried).

Only deaths count: broken connections, broken streams, a core that is gone, a probe that took the engine down. An error that a
request may have earned by itself does not, or one client could shut every engine.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

WINDOW_S = 30.0
MAX_FAILURES = 5
"""Within the window; the one that reaches it opens."""
FIRST_OPEN_S = 1.0
MAX_OPEN_S = 30.0
"""The time doubles with each opening up to here."""
NUM_TRIALS = 2
"""Successes in a row that close it again."""


class Visit:
    """One request at an engine."""

    __slots__ = ()


class Breaker:
    """One engine's."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.reset()

    def reset(self) -> None:
        """Forget everything: another process answers now."""
        self._failures: deque[float] = deque(maxlen=MAX_FAILURES)
        self._open_until_s: float | None = None
        """None while closed."""
        self._num_openings = 0
        self._num_good_trials = 0
        self._trial: Visit | None = None
        """The request that is being tried while half open; no other one's fate says anything then."""

    @property
    def allows(self) -> bool:
        """Whether a request may go to the engine now."""
        return self._open_until_s is None or (self._clock() >= self._open_until_s and self._trial is None)

    @property
    def reason(self) -> str:
        """Why not; empty while closed."""
        if self._open_until_s is None:
            return ""
        left_s = self._open_until_s - self._clock()
        return f"it keeps failing; closed to requests for {left_s:.1f} s" if left_s > 0 else "it kept failing; on trial"

    def begin(self) -> Visit:
        """A request goes to the engine; while half open it is the trial."""
        visit = Visit()
        if self._open_until_s is not None and self.allows:
            self._trial = visit
        return visit

    def end(self, visit: Visit) -> None:
        """A request left the engine, however: if it was the trial, that is over, with or without a verdict."""
        if visit is self._trial:
            self._trial = None

    def succeed(self, visit: Visit) -> None:
        """A request was answered to its end."""
        if self._open_until_s is None or visit is not self._trial:
            return
        self._num_good_trials += 1
        if self._num_good_trials >= NUM_TRIALS:
            self._open_until_s = None
            self._failures.clear()

    def fail(self, visit: Visit | None = None) -> None:
        """The engine failed a request, or fell out of service: None."""
        now_s = self._clock()
        is_half_open = self._open_until_s is not None and now_s >= self._open_until_s
        if self._open_until_s is not None and not (is_half_open and visit in (None, self._trial)):
            return
        if self._failures and now_s - self._failures[-1] > WINDOW_S + MAX_OPEN_S:
            self._num_openings = 0
        self._failures.append(now_s)
        is_full = len(self._failures) == MAX_FAILURES and now_s - self._failures[0] <= WINDOW_S
        if is_half_open or is_full:
            self._open_until_s = now_s + min(FIRST_OPEN_S * 2**self._num_openings, MAX_OPEN_S)
            self._num_openings += 1
            self._num_good_trials = 0
