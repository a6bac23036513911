"""Drafts on disk: writing a version through the store, and loading one back with every check."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafter.draft import MAP_NAME, Draft, draft_from_tensors, draft_tensors
from drafter.geometry import geometry_of_draft, vllm_config
from drafter.target import TargetParts
from drafter.vocabulary import DraftVocabulary
from wire.artifact import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    DraftManifest,
    DraftSource,
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
    source: DraftSource | None = None,
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
                source=source,
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
    manifest = verify_artifact(directory, DraftManifest)
    spec.require(manifest.spec, who=f"draft {version}")
    geometry = geometry_of_draft(read_config(directory, who=f"draft {version}"), spec, who=f"draft {version}")
    draft = draft_from_tensors(read_tensors(directory, who=f"draft {version}"), geometry, target, who=f"draft {version}")
    if draft.head.vocabulary.sha256 != manifest.d2t_sha256:
        raise ArtifactError(f"draft {version}: its vocabulary map is not the one its manifest names")
    return draft


def read_vocabulary(store: DraftStore, version: int) -> DraftVocabulary:
    """The vocabulary map of a version alone, checked against its manifest; raises ArtifactError."""
    manifest = store.manifest(version)
    try:
        with safe_open(store.directory(version) / WEIGHTS_FILE, framework="pt") as opened:
            offsets_U = opened.get_tensor(MAP_NAME)
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"draft {version}: cannot read its vocabulary map: {error}") from error
    vocabulary = DraftVocabulary.from_offsets(offsets_U, manifest.spec.vocab_size)
    if vocabulary.sha256 != manifest.d2t_sha256:
        raise ArtifactError(f"draft {version}: its vocabulary map is not the one its manifest names")
    return vocabulary


def read_config(directory: Path, *, who: str) -> dict[str, Any]:
    """The config.json of a draft's directory; raises ArtifactError."""
    try:
        config = json.loads((directory / CONFIG_FILE).read_text())
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{who}: cannot read {CONFIG_FILE}: {error}") from error
    if not isinstance(config, dict):
        raise ArtifactError(f"{who}: {CONFIG_FILE} holds no JSON object; it is not an EAGLE-3 draft")
    return config


def read_tensors(directory: Path, *, who: str) -> dict[str, Tensor]:
    """Every tensor of a draft's directory, which may be sharded; raises ArtifactError."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        try:
            loaded = load_file(path)
        except (OSError, SafetensorError) as error:
            raise ArtifactError(f"{who}: {path.name} is damaged: {error}") from error
        twice = sorted(loaded.keys() & tensors.keys())
        if twice:
            raise ArtifactError(f"{who}: {path.name} holds {twice[0]} a second time; leave one set of weights in {directory}")
        tensors.update(loaded)
    return tensors
