"""Messages between processes, as small as they come; `changes` replace single fields."""

from __future__ import annotations

from typing import Any

import msgspec
from samples import SPEC

from wire.control import LearnerReport
from wire.messages import AcceptanceCount, CaptureSpan, CaptureStep, EngineStats
from wire.spec import SCHEMA_VERSION


def capture_span(**changes: Any) -> CaptureSpan:
    """One row of a prompt chunk, but for `changes`."""
    span = CaptureSpan(
        request_id="q",
        tenant="a",
        domain="d",
        temperature=0.0,
        first_position=0,
        token_ids=[1],
        num_proposed=0,
        num_accepted=0,
        emitted_ids=[],
        draft_version=0,
    )
    return msgspec.structs.replace(span, **changes)


def capture_step(*spans: CaptureSpan, **changes: Any) -> CaptureStep:
    """A step of these spans without tensors, but for `changes`."""
    step = CaptureStep(
        schema_version=SCHEMA_VERSION,
        spec=SPEC,
        engine_id="engine-0",
        engine_epoch="e",
        step=1,
        target_version=0,
        captured_at_s=0.0,
        spans=list(spans),
        finished_ids=[],
        tensors=[],
    )
    return msgspec.structs.replace(step, **changes)


def engine_stats(*acceptance: AcceptanceCount, **changes: Any) -> EngineStats:
    """The counters of an engine that captured nothing, but for `changes`."""
    stats = EngineStats(
        schema_version=SCHEMA_VERSION,
        engine_id="engine-0",
        engine_epoch="e",
        sent_at_s=0.0,
        draft_version=0,
        target_version=0,
        capture_rate=1.0,
        acceptance=list(acceptance),
        num_captured_rows=0,
        num_dropped_rows={},
    )
    return msgspec.structs.replace(stats, **changes)


def learner_report(**changes: Any) -> LearnerReport:
    """What a learner says before its first step, but for `changes`."""
    report = LearnerReport(
        schema_version=SCHEMA_VERSION,
        state="waiting",
        sent_at_s=0.0,
        num_steps=0,
        loss=None,
        tokens_per_s=0.0,
        num_tokens_seen=0,
        buffer_requests=0,
        buffer_tokens=0,
        buffer_oldest_s=0.0,
        capture_lag_s=0.0,
        num_received_rows=0,
        num_refused_messages=0,
        num_restores=0,
        simulated_al=None,
        num_published=0,
        gate=None,
        num_gate_decisions={},
    )
    return msgspec.structs.replace(report, **changes)
