"""History: the last half hour in small samples, so that a page opened now has a past. The messages of GET /admin/history.

It only keeps what `recorder` gives it, and forgets the oldest.
"""

from __future__ import annotations

import re
import time
import uuid
from collections import deque
from collections.abc import Callable

from fastapi import APIRouter, Response
from msgspec import Struct

from server.errors import ApiError
from server.public import json_response
from wire.artifact import GateReport
from wire.control import CalibrationView, SwapReport
from wire.spec import SCHEMA_VERSION

SAMPLE_EVERY_S = 2.0
KEPT_S = 1800.0
MAX_SAMPLES = round(KEPT_S / SAMPLE_EVERY_S)
MAX_GATES = 64
_NUMBER = re.compile(r"0|[1-9][0-9]{0,14}", re.ASCII)


class DomainSpan(Struct, frozen=True, kw_only=True):
    """Verification of one draft version on one domain, tenants summed."""

    draft_version: int
    domain: str
    num_verify_steps: int
    proposed: tuple[int, ...]
    """By position."""
    accepted: tuple[int, ...]


class TenantSpan(Struct, frozen=True, kw_only=True):
    """Verification for one tenant, drafts and domains summed."""

    tenant: str
    num_verify_steps: int
    num_tokens: int
    """Emitted by these steps."""


class EngineLoad(Struct, frozen=True, kw_only=True):
    """What an engine's own metrics say of its load."""

    num_running: int
    num_waiting: int
    kv_use: float
    """Share of its KV blocks in use, 0 to 1."""


class LearnerPoint(Struct, frozen=True, kw_only=True):
    """The learner's last report, the numbers that move."""

    num_steps: int
    loss: float | None
    tokens_per_s: float
    buffer_tokens: int
    capture_lag_s: float
    simulated_al: float | None


class Sample(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What happened in one span of time. Counts are of the span; other numbers are as of its end."""

    number: int
    """Counts from 1 since the gateway started."""
    at_s: float
    """The span's end, Unix time."""
    span_s: float
    active_version: int | None
    num_in_flight: int
    ended: dict[str, int] = {}
    """Requests by outcome: `served`, `failed`, `refused`, `disconnected`."""
    num_tokens: int = 0
    """Generated, as the engines count them."""
    first_bytes: tuple[tuple[float, int], ...] = ()
    """Streamed answers by the time to their first byte: (seconds within 5 %, number), the shortest first."""
    num_gaps: int = 0
    """Between two chunks of one answer, as the engines count them."""
    gaps_s: float = 0.0
    """Their sum."""
    domains: tuple[DomainSpan, ...] = ()
    tenants: tuple[TenantSpan, ...] = ()
    routed: dict[str, dict[str, int]] = {}
    """Requests by path, then by reason."""
    num_captured_rows: int = 0
    dropped_rows: dict[str, int] = {}
    """By reason."""
    engines: dict[str, EngineLoad] = {}
    """Those whose metrics could be read."""
    learner: LearnerPoint | None = None
    """None where it does not report."""


class GateDecision(Struct, frozen=True, kw_only=True):
    """One decision of the gate, as the learner reported it."""

    at_s: float
    """Unix time at which it was seen."""
    report: GateReport


class HistoryView(Struct, frozen=True, kw_only=True):
    """gateway -> operator: GET /admin/history?after=n."""

    schema_version: int
    epoch: str
    """Changes when the gateway restarts; numbers count anew then."""
    now_s: float
    """The gateway's clock, Unix time."""
    sample_every_s: float
    kept_s: float
    samples: list[Sample]
    """Those numbered above `after`, the newest last."""
    gates: list[GateDecision]
    """Newest last; all that are kept."""
    swaps: list[SwapReport]
    """Newest last; all that are kept."""
    calibration: CalibrationView = CalibrationView()
    """As of now."""


class History:
    """A bounded past: a sample takes 4 kB with a few domains and tenants, and at most about 25 kB."""

    def __init__(self, swaps: deque[SwapReport], calibration: Callable[[], CalibrationView]) -> None:
        self._swaps, self._calibration = swaps, calibration
        self._epoch = uuid.uuid4().hex
        self._samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)
        self._gates: deque[GateDecision] = deque(maxlen=MAX_GATES)

    @property
    def next_number(self) -> int:
        return self._samples[-1].number + 1 if self._samples else 1

    def add(self, sample: Sample) -> None:
        self._samples.append(sample)

    def add_gate(self, decision: GateDecision) -> None:
        self._gates.append(decision)

    def view(self, after: int) -> HistoryView:
        return HistoryView(
            schema_version=SCHEMA_VERSION,
            epoch=self._epoch,
            now_s=time.time(),
            sample_every_s=SAMPLE_EVERY_S,
            kept_s=KEPT_S,
            samples=[sample for sample in self._samples if sample.number > after],
            gates=list(self._gates),
            swaps=list(self._swaps),
            calibration=self._calibration(),
        )


def history_routes(history: History) -> APIRouter:
    """The one route."""
    router = APIRouter()

    @router.get("/admin/history")
    async def get_history(after: str = "0") -> Response:
        if not _NUMBER.fullmatch(after):
            raise ApiError(400, f"after is the number of a sample, got {after[:80]!r}", code="bad_after", param="after")
        return json_response(history.view(int(after)))

    return router
