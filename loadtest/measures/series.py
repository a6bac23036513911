"""The run over time: one row of numbers per window, on the one clock of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from loadtest.measures.arrivals import Arrivals
from loadtest.measures.histogram import Floats, counts_by, sums_by
from loadtest.measures.table import Mask, RequestTable
from loadtest.measures.timeline import Verified, Window
from loadtest.statistics import Interval

Line = list[float | None]
"""One value per window; None where there is none."""


@dataclass(frozen=True)
class Series:
    """Everything by window, warm-up and cool-down included."""

    window_s: float
    start_s: list[float]
    tokens_per_s: Line
    requests_per_s: Line
    """Whole answers."""
    sent_per_s: Line
    """Requests that had to be sent."""
    ttft_p50_ms: Line
    ttft_p99_ms: Line
    good_share: Line
    """Of requests that had to be sent in the window and whose client stayed."""
    num_failed: list[int]
    acceptance_length: Line
    acceptance_length_by_domain: dict[str, Line]
    acceptance_by_position: dict[str, Line]
    """Share of verify steps whose proposal at this position, from 1 on, was accepted; over all domains."""
    active_version: list[int | None]
    kv_usage: dict[str, Line]
    """By engine, share of its KV blocks that are in use."""
    num_running: dict[str, Line]
    num_waiting: dict[str, Line]


@dataclass(frozen=True)
class WorstWindow:
    """Where users fared worst: fewest requests whole and within the objectives; among equals the longest TTFT p99."""

    start_s: float
    end_s: float
    good_share: float | None
    ttft_p99_ms: float | None
    num_requests: int
    num_failed: int


def series(table: RequestTable, arrivals: Arrivals, windows: Sequence[Window], window_s: float) -> Series:
    """By windows of this length, as many as the run has."""
    number = max(len(windows), int(arrivals.last_end_s // window_s) + 1)
    of_request = np.clip(table["intended_at_s"] // window_s, 0, number - 1).astype(np.int64)
    ok = table.has_outcome("ok")
    failed = table.has_outcome("failed", "truncated")
    stayed = ~table.has_outcome("cancelled")
    padded: list[Window | None] = [*windows, *[None] * (number - len(windows))]
    domains = sorted({domain for window in windows for domain, _ in window.verified})
    engines = sorted({engine for window in windows for engine in window.engines})

    def counts(chosen: Mask) -> Floats:
        return counts_by(of_request[chosen], number)

    def quantile(share: float) -> Line:
        by_window = [table["ttft_s"][ok & (of_request == index)] for index in range(number)]
        return [1e3 * float(np.quantile(values, share)) if len(values) else None for values in by_window]

    def gauge(engine: str, name: str) -> Line:
        readings = [window.engines.get(engine) if window else None for window in padded]
        return [getattr(reading, name) if reading else None for reading in readings]

    def lengths(domain: str | None) -> Line:
        return _each(padded, lambda window: window.of_domain(domain).acceptance_length)

    numbers = counts(stayed)
    good = counts(table.is_good)
    return Series(
        window_s=window_s,
        start_s=[index * window_s for index in range(number)],
        tokens_per_s=_rates(arrivals.tokens_by_second(), number, window_s),
        requests_per_s=_rates(arrivals.answers_by_second(), number, window_s),
        sent_per_s=[float(count) / window_s for count in counts(np.ones(len(table), dtype=bool))],
        ttft_p50_ms=quantile(0.5),
        ttft_p99_ms=quantile(0.99),
        good_share=[float(hits / count) if count else None for hits, count in zip(good, numbers, strict=True)],
        num_failed=[int(count) for count in counts(failed)],
        acceptance_length=lengths(None),
        acceptance_length_by_domain={domain: lengths(domain) for domain in domains},
        acceptance_by_position=_by_position(padded),
        active_version=[window.active_version if window else None for window in padded],
        kv_usage={engine: gauge(engine, "kv_usage") for engine in engines},
        num_running={engine: gauge(engine, "num_running") for engine in engines},
        num_waiting={engine: gauge(engine, "num_waiting") for engine in engines},
    )


def worst_window(found: Series, span: Interval, *, has_objectives: bool) -> WorstWindow | None:
    """Among the windows inside the measured span; None where no request was answered."""

    def badness(index: int) -> tuple[float, float]:
        good = found.good_share[index]
        return (0.0 if good is None else 1.0 - good, found.ttft_p99_ms[index] or 0.0)

    inside = [
        index
        for index, start_s in enumerate(found.start_s)
        if span.overlaps(Interval(start_s, start_s + found.window_s)) and found.sent_per_s[index]
    ]
    if not inside:
        return None
    worst = max(inside, key=badness)
    return WorstWindow(
        start_s=found.start_s[worst],
        end_s=found.start_s[worst] + found.window_s,
        good_share=found.good_share[worst] if has_objectives else None,
        ttft_p99_ms=found.ttft_p99_ms[worst],
        num_requests=round((found.sent_per_s[worst] or 0.0) * found.window_s),
        num_failed=found.num_failed[worst],
    )


def _by_position(windows: Sequence[Window | None]) -> dict[str, Line]:
    verified = [window.of_domain(None) if window else Verified() for window in windows]
    depth = max((len(each.accepted) for each in verified), default=0)
    shares = [each.acceptance_by_position for each in verified]
    return {
        str(position + 1): [
            None if not each.steps else share[position] if position < len(share) else 0.0
            for each, share in zip(verified, shares, strict=True)
        ]
        for position in range(depth)
    }


def _each(windows: Sequence[Window | None], value: Callable[[Window], float | None]) -> Line:
    return [value(window) if window else None for window in windows]


def _rates(by_second: Floats, number: int, window_s: float) -> Line:
    sums = sums_by((np.arange(len(by_second)) // window_s).astype(np.int64), by_second, number)
    return [float(total) / window_s for total in sums[:number]]
