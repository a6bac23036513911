"""Waiting for what another thread or process does, however slow the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable

DEADLINE_S = 120.0
"""Far beyond what anything takes: whoever waits that long waits in vain."""


def wait_until(condition: Callable[[], object], what: str = "") -> None:
    """Return once `condition` holds; an AssertionError with `what` was waited for where it never does."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"waited in vain {what}".rstrip()
        time.sleep(0.01)
