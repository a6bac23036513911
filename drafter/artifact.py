"""Drafts on disk: writing a version through the store, and loading one back with every check."""

from __future__ import annotations

import json
import time
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from drafter.draft import Draft, draft_from_tensors, draft_tensors
from drafter.geometry import geometry_of_draft, vllm_config
from drafter.target import TargetParts
from wire.artifact import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    DraftManifest,
    GateReport,
    TrainingReport,
    verify_artifact,
    write_manifest,
)
from wire.errors import ArtifactError
from wire.spec import SCHEMA_VERSION, CaptureSpec, file_sha256, fsync_path
from wire.store import DraftStore


def publish_draft(
    store: DraftStore,
    draft: Draft,
    spec: CaptureSpec,
    *,
    origin: str,
    parent: int | None = None,
    training: TrainingReport | None = None,
    gate: GateReport | None = None,
) -> int:
    """Write the next version and return it; raises OSError on a full disk, nothing is visible then."""

    def fill(directory: Path, version: int) -> None:
        write_draft_files(directory, draft)
        write_manifest(
            directory,
            DraftManifest(
                schema_version=SCHEMA_VERSION,
                version=version,
                parent=parent,
                origin=origin,
                spec=spec,
                d2t_sha256=draft.head.vocabulary.sha256,
                created_at_s=time.time(),
                sha256={name: file_sha256(directory / name) for name in (WEIGHTS_FILE, CONFIG_FILE)},
                training=training,
                gate=gate,
            ),
        )

    return store.publish(fill)


def write_draft_files(directory: Path, draft: Draft) -> None:
    """model.safetensors and config.json, flushed to disk; the manifest is the caller's. Raises OSError on a full disk."""
    try:
        save_file(draft_tensors(draft), directory / WEIGHTS_FILE, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"cannot write {WEIGHTS_FILE}: {error}") from error
    (directory / CONFIG_FILE).write_text(json.dumps(vllm_config(draft.core.geometry), indent=2) + "\n")
    for name in (WEIGHTS_FILE, CONFIG_FILE):
        fsync_path(directory / name)


def load_draft(store: DraftStore, version: int, spec: CaptureSpec, target: TargetParts) -> Draft:
    """A verified version; raises ArtifactError or SpecMismatch."""
    directory = store.directory(version)
    manifest = verify_artifact(directory)
    spec.require(manifest.spec, who=f"draft {version}")
    draft = read_draft_files(directory, spec, target, who=f"draft {version}")
    if draft.head.vocabulary.sha256 != manifest.d2t_sha256:
        raise ArtifactError(f"draft {version}: its vocabulary map is not the one its manifest names")
    return draft


def read_draft_files(directory: Path, spec: CaptureSpec, target: TargetParts, *, who: str) -> Draft:
    """A draft from any directory with config.json and safetensors files; raises ArtifactError."""
    try:
        config = json.loads((directory / CONFIG_FILE).read_text())
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{who}: cannot read {CONFIG_FILE}: {error}") from error
    if not isinstance(config, dict):
        raise ArtifactError(f"{who}: {CONFIG_FILE} holds no JSON object; it is not an EAGLE-3 draft")
    geometry = geometry_of_draft(config, spec, who=who)
    tensors = {}
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ArtifactError(f"{who} holds no *.safetensors file; convert the checkpoint to safetensors first")
    for path in files:
        try:
            tensors.update(load_file(path))
        except (OSError, SafetensorError) as error:
            raise ArtifactError(f"{who}: {path.name} is damaged: {error}") from error
    return draft_from_tensors(tensors, geometry, target, who=who)
