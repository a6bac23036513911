"""StatusPage: everything the gateway knows, as one AdminStatus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from server.traffic import DISCONNECTED, FAILED, REFUSED, SERVED
from wire.control import AcceptanceView, AdminStatus, CaptureView, TrafficView
from wire.spec import SCHEMA_VERSION

if TYPE_CHECKING:
    from server.gateway import Gateway

NUM_SWAPS = 20


class StatusPage:
    """Reads the gateway's parts; changes nothing."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def build(self) -> AdminStatus:
        gateway = self._gateway
        drafts = gateway.drafts
        reason = gateway.fleet.why_not_ready()
        return AdminStatus(
            schema_version=SCHEMA_VERSION,
            ready=not reason,
            reason=reason,
            uptime_s=gateway.uptime_s,
            active_version=drafts.active,
            previous_version=drafts.previous,
            floor_version=drafts.floor,
            rolled_back_versions=sorted(drafts.rolled_back),
            engines=[engine.view() for engine in gateway.fleet.engines],
            canary=gateway.canary.view,
            floor=gateway.floor_watch.view,
            swaps=list(gateway.swap.history)[-NUM_SWAPS:],
            learner=gateway.learner.view(),
            capture=self._capture(),
            acceptance=self._acceptance(),
            traffic=self._traffic(),
            calibration=gateway.calibration(),
            chore_faults=dict(gateway.chores.num_faults),
            active_target_version=gateway.target.targets.active,
        )

    def _capture(self) -> CaptureView:
        ledger = self._gateway.ledger
        rates = [
            worker.capture_rate
            for engine in self._gateway.fleet.ready()
            if engine.status is not None
            for worker in engine.status.workers
        ]
        wished = self._gateway.health.capture_rate
        return CaptureView(
            rate=wished if wished is not None else max(rates, default=None),
            num_captured_rows=ledger.num_captured_rows,
            num_dropped_rows=dict(ledger.num_dropped_rows),
        )

    def _acceptance(self) -> AcceptanceView | None:
        active = self._gateway.drafts.active
        if active is None:
            return None
        tally = self._gateway.ledger.recent_of(active)
        if not tally.num_verify_steps:
            return None
        return AcceptanceView(
            draft_version=active,
            acceptance_length=tally.acceptance_length,
            per_position=tally.rates(),
            num_verify_steps=tally.num_verify_steps,
        )

    def _traffic(self) -> TrafficView:
        ends = self._gateway.traffic.by_outcome
        return TrafficView(
            num_in_flight=self._gateway.admission.num_in_flight,
            num_served=ends[SERVED],
            num_failed=ends[FAILED],
            num_refused=ends[REFUSED],
            num_disconnected=ends[DISCONNECTED],
            num_verified_tokens=self._gateway.ledger.num_verified_tokens,
        )
