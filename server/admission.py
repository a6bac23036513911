"""Admission: how many requests may be in the gateway at once. Over the bound a client is told to come back.

A request takes its slot when its body is complete, so that clients who send theirs slowly keep no others out; the bodies
still arriving have a bound of their own.

There is no queue here; the engines queue. Per-tenant budgets belong beside `slot`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from server.config import AdmissionSettings
from server.errors import ApiError

RETRY_AFTER_S = 1
READS_PER_SLOT = 4
"""Bodies that may be arriving at once, for each slot; they cost the gateway memory, but the engines nothing."""


class Admission:
    """Counts requests in flight; a slot is freed however the request ends."""

    def __init__(self, settings: AdmissionSettings) -> None:
        self.settings = settings
        self.num_in_flight = 0
        self.num_reading = 0

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Count one body that is being read; raises ApiError (429) when too many are."""
        _require_room(self.num_reading, READS_PER_SLOT * self.settings.max_in_flight, "request bodies are being read")
        self.num_reading += 1
        try:
            yield
        finally:
            self.num_reading -= 1

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Hold one slot; raises ApiError (429) when all are taken."""
        _require_room(self.num_in_flight, self.settings.max_in_flight, "requests are in flight")
        self.num_in_flight += 1
        try:
            yield
        finally:
            self.num_in_flight -= 1


def _require_room(count: int, limit: int, what: str) -> None:
    if count >= limit:
        message = f"{count} {what}, the limit is {limit}; retry shortly"
        raise ApiError(429, message, code="too_many_requests", retry_after_s=RETRY_AFTER_S)
