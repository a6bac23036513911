"""A draft artifact: an immutable directory `{model.safetensors, config.json, manifest.json}`, the manifest written last.

This module owns the directory's shape and integrity. It does not know what the tensors mean.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec
from msgspec import Struct

from wire.errors import ArtifactError
from wire.spec import SCHEMA_VERSION, CaptureSpec, file_sha256, fsync_path

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
MANIFEST_FILE = "manifest.json"
_MAX_MANIFEST_BYTES = 1 << 20


class GateReport(Struct, frozen=True, kw_only=True):
    """Why a candidate was (not) published: simulated AL over every position of requests it never trained on."""

    accepted: bool
    reason: str
    candidate_al: float
    incumbent_al: float
    gain_low: float
    """Lower end of the interval of candidate minus incumbent on the newest requests, `learner.gate.confidence` on either side."""
    gain_high: float
    num_requests: int
    """The newest ones, on which the candidate's last weights are judged."""
    worst_anchor_domain: str | None = None
    """None also where the requests spoke against the candidate already, so that no domain was asked."""
    worst_anchor_change: float = 0.0
    evidence: float = 0.0
    """That the learner's weights do better than the incumbent, from all requests counted since it serves (an e-value)."""
    evidence_needed: float = 0.0
    num_counted: int = 0
    """Requests that evidence is from, each counted once."""
    counted_gain: float = 0.0
    """Mean change of AL on them."""


class TrainingReport(Struct, frozen=True, kw_only=True):
    """Provenance of a candidate's weights."""

    num_steps: int
    num_tokens_seen: int
    """Token visits, repeats counted."""
    num_tokens_distinct: int
    loss: float
    """Running mean KL to the target, nats."""
    seed: int


class DraftSource(Struct, frozen=True, kw_only=True):
    """The published checkpoint an imported draft was made from."""

    format: str
    """`eagle` (the layout of SafeAILab/EAGLE) or `speculators` (that of vllm-project/speculators)."""
    path: str
    """Its directory when it was imported, absolute."""
    weights_revision: str
    """Digest over its weight files, see `wire.spec.weights_revision`."""


class DraftManifest(Struct, frozen=True, kw_only=True, tag="draft_manifest"):
    """What an artifact is. `sha256` covers every other file of the directory."""

    schema_version: int
    version: int
    parent: int | None
    origin: str
    """`random`, `imported` or `learned`."""
    spec: CaptureSpec
    d2t_sha256: str
    """Of the draft-to-target vocabulary map's raw int64 bytes."""
    created_at_s: float
    sha256: dict[str, str]
    source: DraftSource | None = None
    """Of an imported draft."""
    training: TrainingReport | None = None
    gate: GateReport | None = None


def write_manifest(directory: Path, manifest: DraftManifest) -> None:
    """Write the manifest durably, as the last file of `directory`."""
    path = directory / MANIFEST_FILE
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(manifest), indent=2))
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    fsync_path(directory)


def read_manifest(directory: Path) -> DraftManifest:
    """The manifest, without looking at the other files; raises ArtifactError."""
    path = directory / MANIFEST_FILE
    try:
        require_file(path, max_bytes=_MAX_MANIFEST_BYTES)
        manifest = msgspec.json.decode(path.read_bytes(), type=DraftManifest)
    except FileNotFoundError:
        raise ArtifactError(f"draft {directory.name} does not exist or was never finished: no {MANIFEST_FILE}") from None
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise ArtifactError(f"draft {directory.name}: unreadable {MANIFEST_FILE}: {error}") from error
    if manifest.schema_version != SCHEMA_VERSION:
        raise ArtifactError(
            f"draft {directory.name} has schema {manifest.schema_version}, this release reads {SCHEMA_VERSION}; publish it anew"
        )
    return manifest


def verify_artifact(directory: Path) -> DraftManifest:
    """The manifest, after every file's checksum was recomputed; raises ArtifactError naming the file that is wrong."""
    manifest = read_manifest(directory)
    if str(manifest.version) != directory.name:
        raise ArtifactError(f"draft {directory.name}: its manifest says version {manifest.version}; the directory was renamed")
    for name in (WEIGHTS_FILE, CONFIG_FILE):
        if name not in manifest.sha256:
            raise ArtifactError(f"draft {directory.name}: its manifest has no checksum for {name}")
    for name, expected in manifest.sha256.items():
        if name != Path(name).name:
            raise ArtifactError(f"draft {directory.name}: its manifest names {name!r}, which is not a plain file name")
        try:
            require_file(directory / name)
            actual = file_sha256(directory / name)
        except OSError as error:
            raise ArtifactError(f"draft {directory.name}: cannot read {name}: {error}") from error
        if actual != expected:
            raise ArtifactError(f"draft {directory.name}: checksum of {name} is {actual[:12]}…, manifest says {expected[:12]}…")
    return manifest


def require_file(path: Path, *, max_bytes: int | None = None) -> None:
    """Raises ArtifactError unless `path` is a plain file: the open of a pipe or a device may never return. Raises OSError."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ArtifactError(f"draft {path.parent.name}: {path.name} is not a plain file")
    if max_bytes is not None and found.st_size > max_bytes:
        raise ArtifactError(f"draft {path.parent.name}: {path.name} has {found.st_size} bytes, at most {max_bytes} are read")
