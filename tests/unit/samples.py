"""What several packages handle, as small as it comes: a draft, what it was trained on, a learner's report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from wire.artifact import CONFIG_FILE, WEIGHTS_FILE, DraftManifest, GateReport, write_manifest
from wire.control import LearnerReport
from wire.spec import SCHEMA_VERSION, CaptureSpec, file_sha256

SPEC = CaptureSpec(
    target_id="tiny",
    target_revision="0123456789abcdef",
    tokenizer_sha256="none",
    dtype="float32",
    hidden_size=4,
    vocab_size=32,
    draft_vocab_size=16,
    aux_layer_ids=(1, 2, 4),
)


def fill(
    directory: Path,
    version: int,
    *,
    parent: int | None = None,
    spec: CaptureSpec = SPEC,
    gate: GateReport | None = None,
    has_weights: bool = False,
) -> None:
    """Write an artifact, as `DraftStore.publish` asks for; its weights are no tensors unless they are there already."""
    if not has_weights:
        (directory / WEIGHTS_FILE).write_bytes(b"weights of %d" % version)
    (directory / CONFIG_FILE).write_text("{}")
    manifest = DraftManifest(
        schema_version=SCHEMA_VERSION,
        version=version,
        parent=parent,
        origin="learned" if gate else "random",
        spec=spec,
        d2t_sha256="0" * 64,
        created_at_s=0.0,
        sha256={name: file_sha256(directory / name) for name in (WEIGHTS_FILE, CONFIG_FILE)},
        gate=gate,
    )
    write_manifest(directory, manifest)


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
