"""Traffic: how requests began to be answered and how they ended. One place counts them for the metrics, status and history."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from server.latency import Latencies
from server.metrics import Metrics

SERVED, FAILED, REFUSED, DISCONNECTED = "served", "failed", "refused", "disconnected"


@dataclass(slots=True)
class Timer:
    """Clock of one request; `outcome` is set as it becomes known."""

    route: str
    started_s: float = field(default_factory=time.perf_counter)
    outcome: str = FAILED
    status: int = 500


class Traffic:
    """Counts beginnings and ends of answers."""

    def __init__(self, metrics: Metrics) -> None:
        self.by_outcome: Counter[str] = Counter()
        self.first_bytes = Latencies()
        """Of streamed answers."""
        self._metrics = metrics

    def first_byte(self, timer: Timer) -> None:
        time_s = time.perf_counter() - timer.started_s
        self.first_bytes.observe(time_s)
        self._metrics.ttft.labels(timer.route).observe(time_s)

    def finished(self, timer: Timer) -> None:
        self.by_outcome[timer.outcome] += 1
        self._metrics.requests.labels(timer.route, str(timer.status), timer.outcome).inc()
        self._metrics.duration.labels(timer.route).observe(time.perf_counter() - timer.started_s)
