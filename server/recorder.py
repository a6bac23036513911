"""Recorder: takes the samples of the history, by comparing cumulative counts with those of the sample before.

It reads the gateway's parts and the engines' own metrics; it changes nothing.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, TypeVar

from server.acceptance import OTHER, Slice
from server.fleet import Engine
from server.history import SAMPLE_EVERY_S, DomainSpan, EngineLoad, GateDecision, LearnerPoint, Sample, TenantSpan
from server.tally import Tally
from wire.errors import EngineError

if TYPE_CHECKING:
    from server.gateway import Gateway

MAX_SLICES = 24
"""Domains (by draft), and tenants, of one sample that keep their name; the quietest beyond are `other`."""
_SCRAPE_TIMEOUT_S = 1.0
_LOAD_LINE = re.compile(
    r"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc|generation_tokens_total"
    r"|inter_token_latency_seconds_(?:sum|count))(?:\{.*\})? (\S+)$",
    re.MULTILINE,
)

Key = TypeVar("Key")


class Recorder:
    """One per gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._at_s = time.monotonic()
        self._counts = _Counts(gateway)
        self._read: dict[tuple[str, str], _Output] = {}
        """By engine id and epoch, as last read."""
        self._num_gates: int | None = None
        """Decisions the learner had counted; None before its first report."""

    async def record(self) -> None:
        """Take samples for as long as the gateway runs."""
        while True:
            await asyncio.sleep(SAMPLE_EVERY_S)
            await self.take()

    async def take(self) -> Sample:
        """Add one sample to the history, and return it."""
        gateway = self._gateway
        pages = await self._scrape()
        now_s, counts, before = time.monotonic(), _Counts(gateway), self._counts
        tallies = _grown_tallies(counts.tallies, before.tallies)
        outputs = [self._output_since(engine, page) for engine, page in pages.items()]
        sample = Sample(
            number=gateway.history.next_number,
            at_s=round(time.time(), 3),
            span_s=round(now_s - self._at_s, 3),
            active_version=gateway.drafts.active,
            num_in_flight=gateway.admission.num_in_flight,
            ended=_grown(counts.ended, before.ended),
            num_tokens=sum(output.num_tokens for output in outputs),
            first_bytes=tuple(sorted(_grown(counts.first_bytes, before.first_bytes).items())),
            num_gaps=sum(output.num_gaps for output in outputs),
            gaps_s=round(sum(output.gaps_s for output in outputs), 4),
            domains=_by_domain(tallies),
            tenants=_by_tenant(tallies),
            routed=_by_path(_grown(counts.routed, before.routed)),
            num_captured_rows=counts.num_captured_rows - before.num_captured_rows,
            dropped_rows=_grown(counts.dropped_rows, before.dropped_rows),
            engines={engine.id: _load(page) for engine, page in pages.items()},
            learner=self._learner(),
        )
        gateway.history.add(sample)
        self._at_s, self._counts = now_s, counts
        self._note_gate()
        return sample

    async def _scrape(self) -> dict[Engine, dict[str, float]]:
        """Load metrics of the engines that answer."""
        engines = self._gateway.fleet.engines
        pages = await asyncio.gather(*(_scrape_one(engine) for engine in engines))
        return {engine: page for engine, page in zip(engines, pages, strict=True) if page}

    def _output_since(self, engine: Engine, page: Mapping[str, float]) -> _Output:
        """Since the last reading of this process; nothing of one met for the first time, whose past has no span."""
        total = _Output.read(page)
        key = (engine.id, engine.epoch)
        last = self._read.get(key)
        self._read = {other: seen for other, seen in self._read.items() if other[0] != engine.id} | {key: total}
        return _Output() if last is None else total.since(last)

    def _learner(self) -> LearnerPoint | None:
        view = self._gateway.learner.view()
        report = view.report
        if report is None or not view.alive:
            return None
        return LearnerPoint(
            num_steps=report.num_steps,
            loss=report.loss,
            tokens_per_s=report.tokens_per_s,
            buffer_tokens=report.buffer_tokens,
            capture_lag_s=report.capture_lag_s,
            simulated_al=report.simulated_al,
        )

    def _note_gate(self) -> None:
        """Remember a decision once. When one was taken that was there before the gateway, nobody can tell."""
        report = self._gateway.learner.report
        if report is None:
            return
        num_gates = sum(report.num_gate_decisions.values())
        if self._num_gates is not None and num_gates > self._num_gates and report.gate is not None:
            self._gateway.history.add_gate(GateDecision(at_s=time.time(), report=report.gate))
        self._num_gates = num_gates


class _Counts:
    """The gateway's cumulative counts at one moment."""

    def __init__(self, gateway: Gateway) -> None:
        ledger = gateway.ledger
        self.tallies = dict(ledger.totals)
        self.num_captured_rows = ledger.num_captured_rows
        self.dropped_rows = dict(ledger.num_dropped_rows)
        self.ended = dict(gateway.traffic.by_outcome)
        self.first_bytes = dict(gateway.traffic.first_bytes.counts)
        self.routed = gateway.routing_metrics.num_routed()


@dataclass(frozen=True, slots=True)
class _Output:
    """What an engine has generated."""

    num_tokens: int = 0
    num_gaps: int = 0
    """vLLM observes one whenever a verify step gives a request tokens after its first (v1/metrics/stats.py), so one per chunk."""
    gaps_s: float = 0.0

    @classmethod
    def read(cls, page: Mapping[str, float]) -> _Output:
        return cls(
            num_tokens=int(page.get("generation_tokens_total", 0.0)),
            num_gaps=int(page.get("inter_token_latency_seconds_count", 0.0)),
            gaps_s=page.get("inter_token_latency_seconds_sum", 0.0),
        )

    def since(self, last: _Output) -> _Output:
        return _Output(
            num_tokens=max(self.num_tokens - last.num_tokens, 0),
            num_gaps=max(self.num_gaps - last.num_gaps, 0),
            gaps_s=max(self.gaps_s - last.gaps_s, 0.0),
        )


async def _scrape_one(engine: Engine) -> dict[str, float]:
    """The load metrics of one engine, its cores summed; empty where it does not answer with any."""
    try:
        text = await engine.client.metrics_text(timeout_s=_SCRAPE_TIMEOUT_S)
    except EngineError:
        return {}
    sums: defaultdict[str, list[float]] = defaultdict(list)
    for name, value in _LOAD_LINE.findall(text):
        try:
            number = float(value)
        except ValueError:
            return {}
        if not isfinite(number):
            return {}
        sums[name].append(number)
    return {name: max(values) if name == "kv_cache_usage_perc" else sum(values) for name, values in sums.items()}


def _load(page: Mapping[str, float]) -> EngineLoad:
    return EngineLoad(
        num_running=int(page.get("num_requests_running", 0.0)),
        num_waiting=int(page.get("num_requests_waiting", 0.0)),
        kv_use=round(page.get("kv_cache_usage_perc", 0.0), 4),
    )


def _grown(now: Mapping[Key, int], before: Mapping[Key, int]) -> dict[Key, int]:
    """What was added to counters, without those that stood still."""
    return {key: count - before.get(key, 0) for key, count in now.items() if count > before.get(key, 0)}


def _grown_tallies(now: Mapping[Slice, Tally], before: Mapping[Slice, Tally]) -> dict[Slice, Tally]:
    changes = {key: tally - before.get(key, Tally()) for key, tally in now.items()}
    return {key: change for key, change in changes.items() if change.num_verify_steps > 0}


def _by_domain(tallies: Mapping[Slice, Tally]) -> tuple[DomainSpan, ...]:
    sums: defaultdict[tuple[int, str], Tally] = defaultdict(Tally)
    for key, tally in tallies.items():
        sums[key.draft_version, key.domain] += tally
    return tuple(
        DomainSpan(
            draft_version=version,
            domain=domain,
            num_verify_steps=tally.num_verify_steps,
            proposed=tally.proposed,
            accepted=tally.accepted,
        )
        for (version, domain), tally in _busiest(sums, lambda key: (key[0], OTHER)).items()
    )


def _by_tenant(tallies: Mapping[Slice, Tally]) -> tuple[TenantSpan, ...]:
    sums: defaultdict[str, Tally] = defaultdict(Tally)
    for key, tally in tallies.items():
        sums[key.tenant] += tally
    return tuple(
        TenantSpan(tenant=tenant, num_verify_steps=tally.num_verify_steps, num_tokens=tally.num_emitted)
        for tenant, tally in _busiest(sums, lambda _: OTHER).items()
    )


def _busiest(sums: Mapping[Key, Tally], other: Callable[[Key], Key]) -> dict[Key, Tally]:
    """A sample's size does not grow with the number of domains and tenants; what is left out by name is counted all the same."""
    ranked = sorted(sums, key=lambda key: sums[key].num_verify_steps, reverse=True)
    kept: defaultdict[Key, Tally] = defaultdict(Tally, {key: sums[key] for key in ranked[:MAX_SLICES]})
    for key in ranked[MAX_SLICES:]:
        kept[other(key)] += sums[key]
    return dict(kept)


def _by_path(counts: Mapping[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    paths: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for (path, reason), count in counts.items():
        paths[path][reason] += count
    return {path: dict(reasons) for path, reasons in paths.items()}
