"""A draft, what it was trained on and a version of the target, as small as they come, for the tests of whoever handles them."""

from __future__ import annotations

from pathlib import Path

from wire.artifact import CONFIG_FILE, WEIGHTS_FILE, DraftManifest, GateReport, write_manifest
from wire.spec import SCHEMA_VERSION, CaptureSpec, file_sha256
from wire.target import TargetCanary, TargetManifest

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


CANARY = TargetCanary(token_ids=(5, 6, 7), logprobs=(-1.0, -2.0), max_mean_error=0.01)


def fill_target(
    directory: Path,
    version: int,
    *,
    parent: int | None = 0,
    spec: CaptureSpec = SPEC,
    canary: TargetCanary = CANARY,
    has_weights: bool = False,
) -> None:
    """Write a version of the target, as `TargetStore.publish` asks for; its weights are no tensors unless they are there already."""
    if not has_weights:
        (directory / WEIGHTS_FILE).write_bytes(b"target weights of %d" % version)
    manifest = TargetManifest(
        schema_version=SCHEMA_VERSION,
        version=version,
        parent=parent,
        created_at_s=0.0,
        sha256={WEIGHTS_FILE: file_sha256(directory / WEIGHTS_FILE)},
        target_id=spec.target_id,
        base_revision=spec.target_revision,
        tokenizer_sha256=spec.tokenizer_sha256,
        canary=canary,
    )
    write_manifest(directory, manifest)
