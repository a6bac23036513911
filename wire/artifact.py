"""An artifact: an immutable directory of weights and what belongs to them, the manifest written last.

A draft's is `{model.safetensors, config.json, manifest.json}`; a target version's (`wire/target.py`) lacks the config. This
module owns the directory's shape and integrity. It does not know what the tensors mean.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import ClassVar, TypeVar

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
    """The newest ones that both were scored on, for an accepted candidate with its last weights; all AL above is of these."""
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


class ArtifactManifest(Struct, frozen=True, kw_only=True):
    """What every artifact says of itself."""

    kind: ClassVar[str]
    """The word for it in errors."""
    files: ClassVar[tuple[str, ...]]
    """Those it must have beside the manifest."""
    schema_version: int
    version: int
    parent: int | None
    created_at_s: float
    sha256: dict[str, str]
    """Of every other file of the directory, by name."""


Manifest = TypeVar("Manifest", bound=ArtifactManifest)


class DraftManifest(ArtifactManifest, frozen=True, kw_only=True, tag="draft_manifest"):
    """What a draft is."""

    kind: ClassVar[str] = "draft"
    files: ClassVar[tuple[str, ...]] = (WEIGHTS_FILE, CONFIG_FILE)
    origin: str
    """`random`, `imported` or `learned`."""
    spec: CaptureSpec
    d2t_sha256: str
    """Of the draft-to-target vocabulary map's raw int64 bytes."""
    source: DraftSource | None = None
    """Of an imported draft."""
    training: TrainingReport | None = None
    gate: GateReport | None = None


def write_manifest(directory: Path, manifest: ArtifactManifest) -> None:
    """Write the manifest durably, as the last file of `directory`."""
    path = directory / MANIFEST_FILE
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(manifest), indent=2))
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    fsync_path(directory)


def read_manifest(directory: Path, kind: type[Manifest]) -> Manifest:
    """The manifest, without looking at the other files; raises ArtifactError."""
    path = directory / MANIFEST_FILE
    who = f"{kind.kind} {directory.name}"
    try:
        require_file(path, kind, max_bytes=_MAX_MANIFEST_BYTES)
        manifest = msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        raise ArtifactError(f"{who} does not exist or was never finished: no {MANIFEST_FILE}") from None
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise ArtifactError(f"{who}: unreadable {MANIFEST_FILE}: {error}") from error
    if manifest.schema_version != SCHEMA_VERSION:
        raise ArtifactError(f"{who} has schema {manifest.schema_version}, this release reads {SCHEMA_VERSION}; publish it anew")
    return manifest


def verify_artifact(directory: Path, kind: type[Manifest]) -> Manifest:
    """The manifest, after every file's checksum was recomputed; raises ArtifactError naming the file that is wrong."""
    manifest = read_manifest(directory, kind)
    who = f"{kind.kind} {directory.name}"
    if str(manifest.version) != directory.name:
        raise ArtifactError(f"{who}: its manifest says version {manifest.version}; the directory was renamed")
    for name in kind.files:
        if name not in manifest.sha256:
            raise ArtifactError(f"{who}: its manifest has no checksum for {name}")
    for name, expected in manifest.sha256.items():
        if name != Path(name).name:
            raise ArtifactError(f"{who}: its manifest names {name!r}, which is not a plain file name")
        try:
            require_file(directory / name, kind)
            actual = file_sha256(directory / name)
        except OSError as error:
            raise ArtifactError(f"{who}: cannot read {name}: {error}") from error
        if actual != expected:
            raise ArtifactError(f"{who}: checksum of {name} is {actual[:12]}…, manifest says {expected[:12]}…")
    return manifest


def require_file(path: Path, kind: type[ArtifactManifest], *, max_bytes: int | None = None) -> None:
    """Raises ArtifactError unless `path` is a plain file: the open of a pipe or a device may never return. Raises OSError."""
    found = path.stat()
    who = f"{kind.kind} {path.parent.name}: {path.name}"
    if not stat.S_ISREG(found.st_mode):
        raise ArtifactError(f"{who} is not a plain file")
    if max_bytes is not None and found.st_size > max_bytes:
        raise ArtifactError(f"{who} has {found.st_size} bytes, at most {max_bytes} are read")
