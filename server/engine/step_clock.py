"""StepClock: cumulative time of decode steps by batch-size bucket and K. What depth control weighs acceptance against.

Written by the step thread, which spends about a microsecond a step here; read by the channel's thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from wire.depth import bucket_of
from wire.messages import StepTime

MAX_OUTLIER = 4.0
"""A step counts as at most that many times the mean of its kind: a swap or another pause may lie inside it."""

Kind = tuple[int, int]
"""(bucket, K)."""


class StepClock:
    """Told of every step at its begin. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._kind: Kind | None = None
        """Of the step before."""
        self._num_alike = 0
        """Steps of that kind in a row."""
        self._began_s = 0.0
        self._num_steps: dict[Kind, int] = {}
        self._total_s: dict[Kind, float] = {}

    def begin(self, scheduler_output: Any) -> None:
        """A step begins, which ends the one before.

        Under async scheduling a begin is paced by the device's work on earlier steps, so a step is counted only if the one
        before it and the one after it are of its kind.
        """
        now_s = self._clock()
        kind = decode_kind(scheduler_output)
        if kind is None or kind != self._kind:
            self._kind, self._num_alike = kind, 1
        else:
            if self._num_alike > 1:
                self._add(kind, now_s - self._began_s)
            self._num_alike += 1
        self._began_s = now_s

    def snapshot(self) -> list[StepTime]:
        with self._lock:
            return [
                StepTime(bucket=bucket, depth=depth, num_steps=num_steps, total_s=self._total_s[bucket, depth])
                for (bucket, depth), num_steps in self._num_steps.items()
            ]

    def _add(self, kind: Kind, duration_s: float) -> None:
        with self._lock:
            num_steps, total_s = self._num_steps.get(kind, 0), self._total_s.get(kind, 0.0)
            if num_steps:
                duration_s = min(duration_s, MAX_OUTLIER * total_s / num_steps)
            self._num_steps[kind] = num_steps + 1
            self._total_s[kind] = total_s + duration_s


def decode_kind(scheduler_output: Any) -> Kind | None:
    """The kind of a step that verifies K proposals of each request and makes K for each; None for any other step.

    A prompt that is being prefilled has no proposals, or other rows than one; so does a request in its first step.
    """
    num_requests = len(scheduler_output.num_scheduled_tokens)
    depth: int = scheduler_output.num_spec_tokens_to_schedule
    num_proposed_for = len(scheduler_output.scheduled_spec_decode_tokens)
    if (
        num_requests == 0
        or scheduler_output.scheduled_new_reqs
        or scheduler_output.total_num_scheduled_tokens != num_requests * (1 + depth)
        or num_proposed_for != (num_requests if depth else 0)
    ):
        return None
    return bucket_of(num_requests), depth
