"""Reporter: a thread that tells the gateway once a second how learning goes, and brings back the operator's orders."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from learner.admin import AdminClient
from wire.control import LearnerOrders, LearnerReport

log = logging.getLogger(__name__)

_INTERVAL_S = 1.0


class Reporter:
    """`make_report` is called on the reporter's thread; it must only read."""

    def __init__(self, client: AdminClient, make_report: Callable[[], LearnerReport]) -> None:
        self._client = client
        self._make_report = make_report
        self._closing = threading.Event()
        self._orders: LearnerOrders | None = None
        self._is_connected = False
        self._thread = threading.Thread(target=self._run, name="reporter", daemon=True)
        self._thread.start()

    @property
    def orders(self) -> LearnerOrders | None:
        """The last orders received; None before the first."""
        return self._orders

    @property
    def is_connected(self) -> bool:
        """Whether the gateway took the last report."""
        return self._is_connected

    def close(self) -> None:
        self._closing.set()
        self._thread.join(timeout=2 * _INTERVAL_S)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._report_once()
            except Exception:  # outermost loop of a thread; a learner that reports no more looks dead
                self._is_connected = False
                log.exception("a report failed, the next one is due in %.0f s", _INTERVAL_S)
            self._closing.wait(_INTERVAL_S)

    def _report_once(self) -> None:
        orders = self._client.report(self._make_report())
        self._is_connected = orders is not None
        if orders is not None:
            self._orders = orders
