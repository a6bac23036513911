"""Attempt: for writes that serving can do without. A full disk or a removed directory must not stop a running system."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable


class Attempt:
    """Calls what may fail: an OSError is told on stderr, once until the same errand succeeds again, and never raised."""

    def __init__(self) -> None:
        self._failing: set[str] = set()

    def __call__(self, errand: str, action: Callable[[], object]) -> bool:
        """Whether `action` succeeded; `errand` completes the sentence "cannot ..."."""
        try:
            action()
        except OSError as error:
            if errand not in self._failing:
                self._failing.add(errand)
                tell(f"paceline: cannot {errand} ({error}); going on without")
            return False
        self._failing.discard(errand)
        return True


def tell(text: str) -> None:
    """A line on stderr, if stderr can be written: it may be a log on the very disk that is full."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
