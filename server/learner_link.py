"""LearnerLink: what the learner last reported and what the operator wants of it.

Serving never waits for the learner: nothing here blocks, and silence is only a number.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from wire.control import LearnerOrders, LearnerReport, LearnerView
from wire.errors import SchemaMismatch
from wire.spec import SCHEMA_VERSION

MAX_SILENCE_S = 15.0
"""A learner reports once a second; one that evaluates a candidate on a busy machine may be late."""


class LearnerLink:
    """One learner."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_paused = False
        self.report: LearnerReport | None = None
        self._received_s = 0.0
        self._clock = clock

    @property
    def age_s(self) -> float | None:
        """Since the last report."""
        return None if self.report is None else self._clock() - self._received_s

    def receive(self, report: LearnerReport, active_version: int, target_version: int) -> LearnerOrders:
        """Take a report, give the orders; raises SchemaMismatch."""
        if report.schema_version != SCHEMA_VERSION:
            raise SchemaMismatch(
                f"the learner speaks schema {report.schema_version}, the gateway {SCHEMA_VERSION}; run the same release"
            )
        self.report, self._received_s = report, self._clock()
        return LearnerOrders(paused=self.is_paused, active_version=active_version, target_version=target_version)

    def view(self) -> LearnerView:
        age_s = self.age_s
        alive = age_s is not None and age_s <= MAX_SILENCE_S
        return LearnerView(alive=alive, paused=self.is_paused, age_s=age_s, report=self.report)
