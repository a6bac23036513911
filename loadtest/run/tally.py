"""Counts of a run while it goes on, of a size that does not grow with it."""

from __future__ import annotations

import statistics
from collections import Counter, deque

from loadtest.measures.definitions import num_tokens
from loadtest.records import RequestRecord
from loadtest.scenario import Scenario

_BIN_MS = 0.05
_NUM_BINS = 40_000
"""Up to two seconds; what lags more counts as two."""
_NUM_RECENT = 500


class LagHistogram:
    """Dispatch lags in bins of 0.05 ms: how late requests were sent, by the load tester's own fault."""

    def __init__(self) -> None:
        self._counts = [0] * (_NUM_BINS + 1)
        self._num = 0
        self._max_ms = 0.0

    def add(self, lag_s: float) -> None:
        lag_ms = max(lag_s * 1000, 0.0)
        self._counts[min(int(lag_ms / _BIN_MS), _NUM_BINS)] += 1
        self._num += 1
        self._max_ms = max(self._max_ms, lag_ms)

    def quantile_ms(self, share: float) -> float | None:
        """The upper edge of the bin that the quantile falls into; None of nothing."""
        left = share * self._num
        for index, count in enumerate(self._counts):
            left -= count
            if count and left <= 0:
                return (index + 1) * _BIN_MS
        return None

    def summary_ms(self) -> dict[str, float | None]:
        values = {"p50": self.quantile_ms(0.5), "p99": self.quantile_ms(0.99), "max": self._max_ms if self._num else None}
        return {name: None if value is None else round(value, 3) for name, value in values.items()}


class Tally:
    """What became of the requests so far."""

    def __init__(self, scenario: Scenario) -> None:
        self._counted_from_s = scenario.cut.warm_up_s
        self._counted_until_s = scenario.duration_s - scenario.cut.cool_down_s
        self.outcomes: Counter[str] = Counter()
        self.num_in_flight = 0
        self.num_sent = 0
        self.num_tokens = 0
        self.lags = LagHistogram()
        self._recent_ttfts_s: deque[float] = deque(maxlen=_NUM_RECENT)

    def begin(self) -> None:
        """A request is sent."""
        self.num_in_flight += 1
        self.num_sent += 1

    def end(self, record: RequestRecord) -> None:
        self.num_in_flight -= 1
        self.outcomes[record.outcome] += 1
        if record.is_open_loop and self._counted_from_s <= record.intended_at_s < self._counted_until_s:
            self.lags.add(record.sent_at_s - record.intended_at_s)
        self.num_tokens += num_tokens(record)
        if record.chunk_times_s:
            self._recent_ttfts_s.append(record.chunk_times_s[0] - record.intended_at_s)

    @property
    def recent_ttft_s(self) -> float | None:
        """Median over the last requests."""
        return statistics.median(self._recent_ttfts_s) if self._recent_ttfts_s else None
