"""Admission: how many requests may be in the gateway at once. Over the bound a client is told to come back.

There is no queue here; the engines queue. Per-tenant budgets belong beside `slot`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from server.config import AdmissionSettings
from server.errors import ApiError

RETRY_AFTER_S = 1


class Admission:
    """Counts requests in flight; a slot is freed however the request ends."""

    def __init__(self, settings: AdmissionSettings) -> None:
        self.settings = settings
        self.num_in_flight = 0

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Hold one slot; raises ApiError (429) when all are taken."""
        if self.num_in_flight >= self.settings.max_in_flight:
            raise ApiError(
                429,
                f"{self.num_in_flight} requests are in flight, the limit is {self.settings.max_in_flight}; retry shortly",
                code="too_many_requests",
                retry_after_s=RETRY_AFTER_S,
            )
        self.num_in_flight += 1
        try:
            yield
        finally:
            self.num_in_flight -= 1
