"""A version of the target: `<state>/targets/<version>/{model.safetensors, manifest.json}`, what a trainer made of the target.

Version 0 is the target's own directory, which every engine starts with; it is not in the store. A version changes weights and
nothing else: tokenizer, configuration, names and shapes are version 0's.
"""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import ClassVar

from msgspec import Struct

from wire.artifact import WEIGHTS_FILE, ArtifactManifest
from wire.errors import SpecMismatch
from wire.spec import CaptureSpec
from wire.store import ArtifactStore

BASE_VERSION = 0
"""The target's own directory."""
_BASE_FIELDS = (("target_id", "target_id"), ("base_revision", "target_revision"), ("tokenizer_sha256", "tokenizer_sha256"))
"""Fields of the manifest and the fields of a CaptureSpec that they must equal."""


class TargetCanary(Struct, frozen=True, kw_only=True):
    """A fixed text and what the new weights make of it: an engine that says otherwise does not serve these weights."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Natural log-probability at temperature 1 of each token but the first, given those before it, as the trainer computes it."""
    max_mean_error: float
    """Largest mean of the absolute differences, in nats. Between fp32 and fp32 it is about 4e-6, between fp32 and bf16 2e-2."""

    def __post_init__(self) -> None:
        if len(self.token_ids) < 2 or len(self.logprobs) != len(self.token_ids) - 1:
            raise ValueError(
                f"a canary of {len(self.token_ids)} tokens needs two tokens at least and a log-probability of each but the first, "
                f"got {len(self.logprobs)}"
            )
        if min(self.token_ids) < 0 or not all(isfinite(value) and value <= 0.0 for value in self.logprobs):
            raise ValueError("a canary's token ids count from 0, its log-probabilities are finite and not above 0")
        if not (isfinite(self.max_mean_error) and self.max_mean_error > 0.0):
            raise ValueError(f"a canary's max_mean_error is a finite number above 0, got {self.max_mean_error}")

    def mean_error(self, logprobs: list[float]) -> float:
        """Mean absolute difference of what an engine says, nats; infinite where it says something of another length or no number."""
        if len(logprobs) != len(self.logprobs) or not all(map(isfinite, logprobs)):
            return float("inf")
        return sum(abs(one - other) for one, other in zip(logprobs, self.logprobs, strict=True)) / len(self.logprobs)


class TargetManifest(ArtifactManifest, frozen=True, kw_only=True, tag="target_manifest"):
    """What a version of the target is."""

    kind: ClassVar[str] = "target"
    files: ClassVar[tuple[str, ...]] = (WEIGHTS_FILE,)
    target_id: str
    base_revision: str
    """`wire.spec.weights_revision` of version 0."""
    tokenizer_sha256: str
    canary: TargetCanary
    num_steps: int = 0
    """Optimiser steps since version 0, for people."""

    def require_base(self, spec: CaptureSpec) -> None:
        """Raise SpecMismatch where it was made from another target than the one `spec` names."""
        differing = [
            f"{ours}: {getattr(self, ours)!r}, here {getattr(spec, theirs)!r}"
            for ours, theirs in _BASE_FIELDS
            if getattr(self, ours) != getattr(spec, theirs)
        ]
        if differing:
            raise SpecMismatch(
                f"target {self.version} was made from another target ({'; '.join(differing)}); train it from the one that is served"
            )


class TargetStore(ArtifactStore[TargetManifest]):
    """The versions above 0, and the pointer `active`, which may name version 0 too. Without it no version was ever activated."""

    folder = "targets"
    first_version = BASE_VERSION + 1
    manifest_type = TargetManifest
    _where_listed = "GET /admin/targets"

    def exists(self, version: int) -> bool:
        return version == BASE_VERSION or super().exists(version)

    def active_since_s(self) -> float:
        """Unix time at which the pointer was written last; 0.0 without one."""
        try:
            return (self.root / "active").lstat().st_mtime
        except OSError:
            return 0.0

    def weights(self, version: int) -> Path:
        """The file of a version above 0."""
        return self.directory(version) / WEIGHTS_FILE
