"""Throughput: what arrived at the clients, second by second, whenever it had been asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import ceil

import numpy as np

from loadtest.measures import bootstrap, definitions
from loadtest.measures.bootstrap import Blocks
from loadtest.measures.histogram import Floats, counts_by
from loadtest.records import RequestRecord
from loadtest.statistics import Estimate, Interval


class Arrivals:
    """Tokens, whole answers and requests in flight by second of the run; fed with every request, those cut off too."""

    def __init__(self) -> None:
        self._tokens = _Seconds()
        self._answers = _Seconds()
        self._in_flight = _Seconds()
        self.last_end_s = 0.0

    def watch(self, records: Iterable[RequestRecord]) -> Iterator[RequestRecord]:
        """Pass the records on and note what arrived when."""
        for record in records:
            self.note(record)
            yield record

    def note(self, record: RequestRecord) -> None:
        if record.chunk_times_s:
            self._tokens.add(np.asarray(record.chunk_times_s), np.asarray(definitions.tokens_by_chunk(record), dtype=float))
        if record.outcome == "ok":
            self._answers.add(np.asarray([record.ended_at_s]), np.ones(1))
        alive = np.arange(int(max(record.sent_at_s, 0.0)), int(max(record.ended_at_s, 0.0)) + 1, dtype=float)
        self._in_flight.add(alive, np.ones(len(alive)))
        self.last_end_s = max(self.last_end_s, record.ended_at_s)

    def tokens_by_second(self) -> Floats:
        return self._tokens.trimmed()

    def answers_by_second(self) -> Floats:
        return self._answers.trimmed()

    def in_flight_by_second(self) -> Floats:
        """Requests that were open at some time within each second."""
        return self._in_flight.trimmed()


class _Seconds:
    """A sum for each second; what came before the start counts for the first."""

    def __init__(self) -> None:
        self._sums = np.zeros(64)
        self._number = 0

    def add(self, times_s: Floats, amounts: Floats) -> None:
        seconds = np.maximum(times_s, 0.0).astype(np.int64)
        self._number = max(self._number, int(seconds[-1]) + 1)
        while self._number > len(self._sums):
            self._sums = np.concatenate([self._sums, np.zeros(len(self._sums))])
        np.add.at(self._sums, seconds, amounts)

    def trimmed(self) -> Floats:
        return self._sums[: self._number]


@dataclass(frozen=True)
class Throughput:
    """Of the measured span."""

    requests_per_s: Estimate
    """Answers that came whole."""
    good_requests_per_s: Estimate
    tokens_per_s: Estimate
    """Tokens of answers, those of requests that failed later too."""
    max_tokens_per_s: float
    """Of the best second."""
    max_in_flight: int


def between(by_second: Floats, edges_s: Floats, last_end_s: float) -> Floats:
    """What falls between each two edges; within a second, and within the run's last part of one, evenly spread."""
    times_s = np.append(np.arange(len(by_second), dtype=float), max(last_end_s, len(by_second) - 1 + 1e-9))
    return np.diff(np.interp(edges_s, times_s, np.append(0.0, np.cumsum(by_second))))


def throughput(arrivals: Arrivals, span: Interval, good_at_s: Floats, blocks: Blocks) -> Throughput:
    """Rates over the span. `good_at_s`: the intended times, within the span, of the requests that count for goodput."""
    edges_s = np.linspace(span.start_s, span.end_s, blocks.number + 1)
    # What comes at the very end of the run belongs to it.
    edges_s[-1] = edges_s[-1] if span.end_s < arrivals.last_end_s else arrivals.last_end_s + 1.0
    tokens, answers = arrivals.tokens_by_second(), arrivals.answers_by_second()
    seconds = slice(int(span.start_s), ceil(span.end_s))
    return Throughput(
        requests_per_s=_rate(between(answers, edges_s, arrivals.last_end_s), span, blocks),
        good_requests_per_s=_rate(counts_by(blocks.of(good_at_s), blocks.number), span, blocks),
        tokens_per_s=_rate(between(tokens, edges_s, arrivals.last_end_s), span, blocks),
        max_tokens_per_s=float(tokens[seconds].max(initial=0.0)),
        max_in_flight=int(arrivals.in_flight_by_second()[seconds].max(initial=0.0)),
    )


def _rate(sums: Floats, span: Interval, blocks: Blocks) -> Estimate:
    return bootstrap.ratio(blocks, sums, np.full(blocks.number, span.length_s / blocks.number))
