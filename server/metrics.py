"""Metrics the gateway counts itself as things happen: requests, swaps, commit stalls.

What can be read off some state at scrape time is in `collectors` instead. Names begin with `paceline_`.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from wire.control import SwapReport
from wire.target_control import TargetSwapReport

_LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_STALL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class Metrics:
    """One registry per gateway, so several gateways can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.requests = Counter("paceline_requests", "Finished requests.", ["route", "status", "outcome"], registry=registry)
        self.in_flight = Gauge("paceline_requests_in_flight", "Requests inside the gateway.", registry=registry)
        self.ttft = Histogram(
            "paceline_time_to_first_byte_seconds",
            "From the request's arrival to the first byte of a streamed answer.",
            ["route"],
            buckets=_LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.duration = Histogram(
            "paceline_request_duration_seconds",
            "From the request's arrival to the end of its answer.",
            ["route"],
            buckets=_LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.retries = Counter(
            "paceline_request_retries",
            "Attempts repeated before the first byte, by engine left.",
            ["engine"],
            registry=registry,
        )
        self.moves = Counter(
            "paceline_stream_moves", "Streams that went on elsewhere, by engine left.", ["engine"], registry=registry
        )
        self.prefill_failures = Counter(
            "paceline_prefill_failures",
            "Prefill legs that gave no KV, so that the decode engine computed the prompt, by prefill engine.",
            ["engine"],
            registry=registry,
        )
        self.leases_held = Gauge(
            "paceline_kv_leases_held", "KV held by prefill engines for requests that wait for it.", registry=registry
        )
        self.leases = Counter(
            "paceline_kv_leases",
            "Ends of such holds: `pulled` by a decode engine, `released` unused, or left until they `expired`.",
            ["end"],
            registry=registry,
        )
        self.swaps = Counter(
            "paceline_swaps", "Attempts to change the active draft.", ["trigger", "outcome"], registry=registry
        )
        self.commit_stall = Histogram(
            "paceline_commit_stall_seconds",
            "Time a commit took: `apply` inside the worker, `rpc` with the wait for the step in flight.",
            ["phase"],
            buckets=_STALL_BUCKETS_S,
            registry=registry,
        )
        self.target_swaps = Counter(
            "paceline_target_swaps", "Attempts to change the active target.", ["trigger", "outcome"], registry=registry
        )
        self.target_stall = Histogram(
            "paceline_target_commit_stall_seconds",
            "Time a commit of a target took on one engine, from the wish to pause until requests ran again.",
            buckets=_LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.canary_verdicts = Counter("paceline_canary_verdicts", "Ends of canaries.", ["outcome"], registry=registry)
        self.chore_faults = Counter(
            "paceline_chore_faults", "Failures of the gateway's own background work.", ["chore"], registry=registry
        )
        self.bad_events = Counter("paceline_bad_events", "Engine events that could not be used.", ["engine"], registry=registry)

    def observe_swap(self, report: SwapReport) -> None:
        self.swaps.labels(report.trigger, report.outcome).inc()
        for commit in report.commits.values():
            self.commit_stall.labels("apply").observe(commit.apply_ms / 1000)
            self.commit_stall.labels("rpc").observe(commit.rpc_ms / 1000)

    def observe_target_swap(self, report: TargetSwapReport) -> None:
        self.target_swaps.labels(report.trigger, report.outcome).inc()
        for commit in report.commits.values():
            self.target_stall.observe(commit.total_ms / 1000)
