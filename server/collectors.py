"""Metrics read off the gateway's state at scrape time: acceptance, capture, engines, drafts, learner.

Reading at scrape time means that a forgotten version's series disappear by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import zip_longest

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from server.acceptance import MAX_VERSIONS, AcceptanceLedger, Slice
from server.drafts import Drafts
from server.fleet import Fleet
from server.learner_link import LearnerLink
from wire.control import CalibrationView

_SLICE = ["draft_version", "tenant", "domain"]
_POSITION = ["draft_version", "position", "tenant", "domain"]


class AcceptanceCollector:
    """AL and the counters it comes from, of the newest versions."""

    def __init__(self, ledger: AcceptanceLedger, drafts: Drafts) -> None:
        self._ledger = ledger
        self._drafts = drafts

    def collect(self) -> Iterator[Metric]:
        length = GaugeMetricFamily("paceline_acceptance_length", "Tokens emitted per verify step, recently.", labels=_SLICE)
        steps = CounterMetricFamily("paceline_verify_steps", "Verify steps with at least one proposal.", labels=_SLICE)
        proposed = CounterMetricFamily("paceline_proposed_tokens", "Draft tokens proposed, by position.", labels=_POSITION)
        accepted = CounterMetricFamily("paceline_accepted_tokens", "Draft tokens accepted, by position.", labels=_POSITION)
        exported = self._exported()
        for key, tally in self._ledger.recent().items():
            if key.draft_version in exported:
                length.add_metric(_labels(key), tally.acceptance_length)
        for key, tally in self._ledger.totals.items():
            if key.draft_version not in exported:
                continue
            version, tenant, domain = _labels(key)
            steps.add_metric([version, tenant, domain], tally.num_verify_steps)
            counts = zip_longest(tally.proposed, tally.accepted, fillvalue=0)
            for position, (num_proposed, num_accepted) in enumerate(counts):
                proposed.add_metric([version, str(position), tenant, domain], num_proposed)
                accepted.add_metric([version, str(position), tenant, domain], num_accepted)
        yield from (length, steps, proposed, accepted)
        yield CounterMetricFamily("paceline_captured_rows", "Rows sent to the learner.", value=self._ledger.num_captured_rows)
        dropped = CounterMetricFamily("paceline_dropped_rows", "Rows not sent, by reason.", labels=["reason"])
        for reason, count in self._ledger.num_dropped_rows.items():
            dropped.add_metric([reason], count)
        yield dropped

    def _exported(self) -> set[int | None]:
        versions = sorted({key.draft_version for key in self._ledger.totals}, reverse=True)
        return {*versions[:MAX_VERSIONS], self._drafts.active}


class FleetCollector:
    """Engines and the drafts they serve."""

    def __init__(self, fleet: Fleet, drafts: Drafts) -> None:
        self._fleet = fleet
        self._drafts = drafts

    def collect(self) -> Iterator[Metric]:
        ready = GaugeMetricFamily("paceline_engine_ready", "1 where requests may go.", labels=["engine"])
        in_flight = GaugeMetricFamily("paceline_engine_requests_in_flight", "Requests on an engine.", labels=["engine"])
        draft = GaugeMetricFamily("paceline_engine_draft_version", "Draft an engine serves.", labels=["engine"])
        target = GaugeMetricFamily("paceline_engine_target_version", "Target an engine computes with.", labels=["engine"])
        for engine in self._fleet.engines:
            ready.add_metric([engine.id], float(engine.ready))
            in_flight.add_metric([engine.id], engine.num_in_flight)
            if engine.draft_version is not None:
                draft.add_metric([engine.id], engine.draft_version)
            if engine.target_version is not None:
                target.add_metric([engine.id], engine.target_version)
        yield from (ready, in_flight, draft, target)
        serving = [engine.draft_version for engine in self._fleet.ready() if engine.draft_version is not None]
        if serving:
            skew = max(serving) - min(serving)
            yield _gauge("paceline_draft_version_skew", "Newest less oldest draft over ready engines; 0 outside a swap.", skew)
        if self._drafts.active is not None:
            yield _gauge("paceline_active_draft_version", "The active draft.", self._drafts.active)


class CalibrationCollector:
    """How the gate's simulated AL goes with served AL."""

    def __init__(self, calibration: Callable[[], CalibrationView]) -> None:
        self._calibration = calibration

    def collect(self) -> Iterator[Metric]:
        view = self._calibration()
        yield _gauge("paceline_calibration_pairs", "Drafts with simulated and enough served AL.", len(view.pairs))
        if view.bias is not None:
            yield _gauge("paceline_calibration_bias", "Mean of served less simulated AL.", view.bias)
        if view.correlation is not None:
            yield _gauge("paceline_calibration_correlation", "Of simulated with served AL over drafts.", view.correlation)


class LearnerCollector:
    """The learner's last report."""

    def __init__(self, learner: LearnerLink) -> None:
        self._learner = learner

    def collect(self) -> Iterable[Metric]:
        view, report = self._learner.view(), self._learner.report
        yield _gauge("paceline_learner_up", "1 where it reports.", float(view.alive))
        yield _gauge("paceline_learner_paused", "1 where the operator has paused it.", float(view.paused))
        if report is None or view.age_s is None:
            return
        yield _gauge("paceline_learner_report_age_seconds", "Since its last report.", view.age_s)
        yield _counter("paceline_learner_steps", "Training steps.", report.num_steps)
        yield _counter("paceline_learner_tokens", "Tokens trained on, repeats counted.", report.num_tokens_seen)
        yield _gauge("paceline_learner_tokens_per_second", "Training speed.", report.tokens_per_s)
        yield _gauge("paceline_learner_buffer_requests", "Requests in the replay buffer.", report.buffer_requests)
        yield _gauge("paceline_learner_buffer_tokens", "Tokens in the replay buffer.", report.buffer_tokens)
        yield _gauge("paceline_learner_buffer_age_seconds", "Age of its oldest sample.", report.buffer_oldest_s)
        yield _gauge("paceline_capture_lag_seconds", "Age of the newest captured step on arrival.", report.capture_lag_s)
        yield _counter("paceline_learner_received_rows", "Captured rows received.", report.num_received_rows)
        yield _counter("paceline_learner_refused_messages", "Capture messages refused.", report.num_refused_messages)
        yield _counter("paceline_learner_restores", "Falls back to a checkpoint.", report.num_restores)
        yield _counter("paceline_learner_timed_out_requests", "Closed as nothing more came.", report.num_timed_out_requests)
        yield _counter("paceline_learner_evicted_requests", "Closed for want of room.", report.num_evicted_requests)
        yield _counter("paceline_learner_late_spans", "Captured spans of closed requests.", report.num_late_spans)
        yield _counter("paceline_learner_cut_rows", "Captured rows beyond what one request may keep.", report.num_cut_rows)
        yield _counter("paceline_learner_dropped_requests", "Forgotten as computing failed.", report.num_dropped_requests)
        yield _counter("paceline_learner_published", "Drafts published.", report.num_published)
        if report.loss is not None:
            yield _gauge("paceline_learner_loss", "Training loss.", report.loss)
        if report.simulated_al is not None:
            yield _gauge("paceline_learner_simulated_acceptance_length", "On held-out requests.", report.simulated_al)
        if report.wanted_vocabulary_size is not None:
            yield _gauge(
                "paceline_learner_wanted_vocabulary_size",
                "Draft tokens that can be expected to cover 98 % of what each domain says.",
                report.wanted_vocabulary_size,
            )
        covered = GaugeMetricFamily(
            "paceline_draft_vocabulary_coverage",
            "Share of emitted tokens that the active draft can propose.",
            labels=["tenant", "domain"],
        )
        counted = GaugeMetricFamily(
            "paceline_draft_vocabulary_coverage_tokens",
            "Emitted tokens that coverage is told by, older ones counting less.",
            labels=["tenant", "domain"],
        )
        for one in report.vocabulary_coverage:
            covered.add_metric([one.tenant, one.domain], one.share)
            counted.add_metric([one.tenant, one.domain], one.num_tokens)
        yield covered
        yield counted
        decisions = CounterMetricFamily("paceline_gate_decisions", "Gate decisions.", labels=["outcome"])
        for outcome, count in report.num_gate_decisions.items():
            decisions.add_metric([outcome], count)
        yield decisions


def _labels(key: Slice) -> list[str]:
    return [str(key.draft_version), key.tenant, key.domain]


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)
