"""Everything that is measured of one run, from the files in its directory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from loadtest.detectors.domain_shift import Recovery, recoveries
from loadtest.detectors.swap_blip import SwapBlip, swap_blip
from loadtest.measures import acceptance, bootstrap, headline
from loadtest.measures.acceptance import Acceptance, Cost
from loadtest.measures.arrivals import Arrivals, Throughput, throughput
from loadtest.measures.bootstrap import Blocks
from loadtest.measures.run_directory import RunDirectory
from loadtest.measures.series import Series, WorstWindow, series, worst_window
from loadtest.measures.summary import Summary, by_group, summarize
from loadtest.measures.table import Mask, RequestTable
from loadtest.measures.timeline import Timeline, VerifiedRequests, read_timeline, take_verified, window_length_s
from loadtest.records import REQUESTS_FILE, TIMELINE_FILE, RequestRecord
from loadtest.scenario import Scenario
from loadtest.statistics import Estimate, Interval

MAX_UNREADABLE = 2
"""Half a last line in each file is what a killed run leaves; more is a damaged disk or another format."""


@dataclass(frozen=True)
class Analysis:
    """One run, measured."""

    run: RunDirectory
    span: Interval
    """What is measured: the run less warm-up and cool-down, by intended send time."""
    table: RequestTable
    """All requests, those cut off too."""
    measured: Mask
    """The requests within the span."""
    blocks: Blocks
    everything: Summary
    groups: Mapping[str, Mapping[str, Summary]]
    throughput: Throughput
    timeline: Timeline
    acceptance_source: str
    """`counters` of the system, `requests` as the engine tells of each, or `nothing`."""
    acceptance: Acceptance
    acceptance_by_source: Mapping[str, Acceptance]
    """From the system's `counters` and from what the engine tells of `requests`, each where it tells of any verify step."""
    acceptance_by_domain: Mapping[str, Acceptance]
    acceptance_by_version: Mapping[str, Acceptance]
    cost: Cost
    series: Series
    worst: WorstWindow | None
    blip: SwapBlip | None
    recoveries: list[Recovery]
    dispatch_lag_p99_ms: float | None
    why_invalid: list[str]
    """Empty for a run whose numbers can be believed."""

    @property
    def scenario(self) -> Scenario:
        return self.run.scenario

    @property
    def acceptance_length_difference(self) -> float | None:
        """AL of the requests less AL of the counters; None where only one of them tells it."""
        found = self.acceptance_by_source
        if len(found) < 2:
            return None
        return found["requests"].acceptance_length.value - found["counters"].acceptance_length.value

    @property
    def has_objectives(self) -> bool:
        return has_objectives(self.scenario)

    @property
    def headline(self) -> Mapping[str, Estimate]:
        """The measures that runs are compared by."""
        return headline.headline(
            self.everything, self.throughput, self.acceptance, self.cost, has_objectives=self.has_objectives
        )


def has_objectives(scenario: Scenario) -> bool:
    return any(limit is not None for limit in (scenario.slo.ttft_ms, scenario.slo.tpot_ms, scenario.slo.e2e_ms))


def analyse(path: Path) -> Analysis:
    """Measure the run in this directory; raises RunDirectoryError and ConfigError where there is none."""
    run = RunDirectory(path)
    scenario = run.scenario
    window_s = window_length_s(scenario.duration_s)
    arrivals, verified = Arrivals(), VerifiedRequests(window_s)
    timeline = read_timeline(run.samples(), window_s)
    table = RequestTable(verified.watch(arrivals.watch(run.requests())), scenario.slo, timeline.swaps)
    span = measured_span(scenario, arrivals.last_end_s)
    blocks = bootstrap.divide(span.start_s, span.end_s)
    by_source = {
        name: acceptance.overall(acceptance.inside(found.windows, span), blocks)
        for name, found in (("counters", timeline), ("requests", verified.timeline))
    }
    source = take_verified(timeline, verified.timeline)
    intended_s = table["intended_at_s"]
    measured = (intended_s >= span.start_s) & (intended_s < span.end_s)
    everything = summarize(table, measured, blocks)
    windows = acceptance.inside(timeline.windows, span)
    found = series(table, arrivals, timeline.windows, window_s)
    lag_ms = dispatch_lag_p99_ms(table, measured)
    return Analysis(
        run=run,
        span=span,
        table=table,
        measured=measured,
        blocks=blocks,
        everything=everything,
        groups=by_group(table, measured, blocks),
        throughput=throughput(arrivals, span, intended_s[measured & table.is_good], blocks),
        timeline=timeline,
        acceptance_source=source,
        acceptance=acceptance.overall(windows, blocks),
        acceptance_by_source={name: found for name, found in by_source.items() if found.num_steps},
        acceptance_by_domain=acceptance.by_domain(windows, blocks),
        acceptance_by_version=acceptance.by_version(windows, blocks),
        cost=acceptance.cost(windows, blocks),
        series=found,
        worst=worst_window(found, span, has_objectives=has_objectives(scenario)),
        blip=swap_blip(within(run.requests(), span), timeline.swaps, span),
        recoveries=recoveries(timeline.windows, scenario),
        dispatch_lag_p99_ms=lag_ms,
        why_invalid=why_invalid(run, everything, lag_ms),
    )


def measured_span(scenario: Scenario, last_end_s: float) -> Interval:
    """The run less both cuts. Without a cool-down nothing is cut at the end, and the last answers are waited for."""
    start_s = scenario.cut.warm_up_s
    planned_end_s = scenario.duration_s - scenario.cut.cool_down_s
    end_s = min(planned_end_s, last_end_s) if scenario.cut.cool_down_s else last_end_s
    return Interval(start_s, max(start_s, end_s))


def within(records: Iterable[RequestRecord], span: Interval) -> Iterator[RequestRecord]:
    return (record for record in records if span.start_s <= record.intended_at_s < span.end_s)


def dispatch_lag_p99_ms(table: RequestTable, measured: Mask) -> float | None:
    """By how much the sender lagged behind its schedule; None where nothing was due at a fixed time."""
    lags_s = (table["sent_at_s"] - table["intended_at_s"])[measured & table.is_open_loop]
    return 1e3 * float(np.quantile(lags_s, 0.99)) if len(lags_s) else None


def why_invalid(run: RunDirectory, everything: Summary, lag_p99_ms: float | None) -> list[str]:
    """What speaks against believing the numbers: what the run itself found, and what its files show."""
    reasons = list(run.record.invalid_reasons) if run.record else []
    bound_ms = run.scenario.max_dispatch_lag_p99_ms
    if run.record is None or run.record.is_valid is None:
        reasons.append("the run was killed: run.json does not tell its end")
        if lag_p99_ms is not None and lag_p99_ms > bound_ms:
            reasons.append(f"the sender lagged behind its schedule by {lag_p99_ms:.1f} ms (p99), more than {bound_ms:g} ms")
    if not everything.num_requests:
        reasons.append("no request was sent in the measured span")
    elif not everything.num_by_outcome["ok"]:
        reasons.append(f"none of {everything.num_requests} requests was answered whole")
    num_unreadable = run.num_unreadable[REQUESTS_FILE] + run.num_unreadable[TIMELINE_FILE]
    if num_unreadable > MAX_UNREADABLE:
        reasons.append(f"{num_unreadable} lines of the run's files could not be read")
    return reasons
