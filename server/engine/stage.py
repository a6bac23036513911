"""Stage: weights held in host memory, checked, before anything touches a model.

Staging runs in a background thread off the compute cores. Whatever is wrong with an artifact is found here.

Shape letters: U draft vocabulary.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from server.engine.affinity import leave_compute_cores
from wire.artifact import CONFIG_FILE, WEIGHTS_FILE
from wire.errors import ArtifactError, PacelineError
from wire.spec import CaptureSpec
from wire.store import DraftStore

_MAX_HELD = 4
"""Of drafts, which are small."""

# Published by training frameworks, of no use to the engine.
_IGNORED_TENSORS = frozenset({"t2d"})


class StagedWeights(NamedTuple):
    """Tensors by checkpoint name, and the parsed config.json they belong to."""

    tensors: dict[str, torch.Tensor]
    config: dict[str, Any]
    sha256: str = ""
    """Of the file they were read from, where that was verified."""


class Stage:
    """Staged versions of one model; holds the newest few and whatever `protect` names."""

    def __init__(self, load: Callable[[int], StagedWeights], *, kind: str = "draft", max_held: int = _MAX_HELD) -> None:
        """`kind` is the word for it in errors."""
        self._load = load
        self._kind = kind
        self._max_held = max_held
        self._lock = threading.Lock()
        self._held: dict[int, StagedWeights] = {}
        self._refused: dict[int, PacelineError] = {}
        self.protect: set[int] = set()

    def load_now(self, version: int) -> StagedWeights:
        """Load and hold a version; raises ArtifactError or SpecMismatch."""
        weights = self._load(version)
        with self._lock:
            self._held[version] = weights
            disposable = [held for held in self._held if held not in self.protect | {version}]
            for held in disposable[: max(len(self._held) - self._max_held, 0)]:
                del self._held[held]
        return weights

    def begin(self, version: int) -> None:
        """Load a version in the background, after what `protect` names and is not held yet; `outcome` tells when it is done."""
        with self._lock:
            self._refused.pop(version, None)
            if version in self._held:
                return
        threading.Thread(
            target=self._load_in_background, args=(version,), name=f"paceline-stage-{version}", daemon=True
        ).start()

    def outcome(self, version: int) -> bool:
        """True once staged, False while loading; raises what loading raised."""
        with self._lock:
            if version in self._refused:
                raise self._refused.pop(version)
            return version in self._held

    def get(self, version: int) -> StagedWeights | None:
        with self._lock:
            return self._held.get(version)

    def versions(self) -> list[int]:
        with self._lock:
            return sorted(self._held)

    def _load_in_background(self, version: int) -> None:
        leave_compute_cores()
        try:
            # What is in force first: a version is staged only where the way back from it is at hand.
            for needed in sorted(self.protect - set(self.versions()) - {version}):
                self.load_now(needed)
            self.load_now(version)
        except PacelineError as error:
            self._refuse(version, error)
        except (OSError, RuntimeError, MemoryError) as error:
            self._refuse(version, ArtifactError(f"{self._kind} {version} cannot be loaded: {type(error).__name__}: {error}"))

    def _refuse(self, version: int, error: PacelineError) -> None:
        with self._lock:
            self._refused[version] = error


class DraftLoader:
    """Reads a draft artifact and refuses everything the engine could not swap in safely.

    `reference` is the draft the engine started with: names, shapes and geometry are fixed for an engine's life.
    """

    def __init__(self, store: DraftStore, spec: CaptureSpec) -> None:
        self._store = store
        self._spec = spec
        self.reference: StagedWeights | None = None

    def __call__(self, version: int) -> StagedWeights:
        """Raises ArtifactError or SpecMismatch."""
        directory = self._store.directory(version)
        manifest = self._store.verify(version)
        self._spec.require(manifest.spec, who=f"draft {version}")
        weights = read_weights(directory)
        check_values(weights.tensors, self._spec, who=f"draft {version}")
        if self.reference is not None:
            check_geometry(weights, self.reference, who=f"draft {version}")
        return weights


def read_weights(directory: Path) -> StagedWeights:
    """Tensors and config of a directory; raises ArtifactError."""
    try:
        tensors = load_file(directory / WEIGHTS_FILE)
        config = json.loads((directory / CONFIG_FILE).read_text())
    except (OSError, SafetensorError, ValueError) as error:
        raise ArtifactError(f"draft {directory.name}: unreadable: {error}") from error
    if not isinstance(config, dict):
        raise ArtifactError(f"draft {directory.name}: {CONFIG_FILE} holds no JSON object")
    return StagedWeights({name: tensor for name, tensor in tensors.items() if name not in _IGNORED_TENSORS}, config)


def check_values(tensors: dict[str, torch.Tensor], spec: CaptureSpec, *, who: str) -> None:
    """Raise ArtifactError for embeddings, wrong dtypes, non-finite numbers, or a map that leaves the vocabulary."""
    for name, tensor in tensors.items():
        if "embed_tokens" in name:
            raise ArtifactError(
                f"{who} carries {name}: the engine shares the target's embeddings, loading them would overwrite the target"
            )
        if tensor.is_floating_point():
            if tensor.dtype != getattr(torch, spec.dtype):
                raise ArtifactError(f"{who}: {name} is {tensor.dtype}, this engine needs torch.{spec.dtype}")
            if not torch.isfinite(tensor).all():
                raise ArtifactError(f"{who}: {name} holds NaN or infinite values")
    if "d2t" not in tensors or tensors["d2t"].dtype != torch.int64 or tensors["d2t"].shape != (spec.draft_vocab_size,):
        raise ArtifactError(f"{who}: d2t must be an int64 tensor of {spec.draft_vocab_size} offsets")
    target_ids_U = tensors["d2t"] + torch.arange(spec.draft_vocab_size)
    if (
        int(target_ids_U.min()) < 0
        or int(target_ids_U.max()) >= spec.vocab_size
        or target_ids_U.unique().numel() != spec.draft_vocab_size
    ):
        raise ArtifactError(f"{who}: d2t maps outside the target's {spec.vocab_size} tokens, or two draft tokens onto one")


def check_geometry(weights: StagedWeights, reference: StagedWeights, *, who: str) -> None:
    """Raise ArtifactError where names, shapes or the draft's config differ from the draft the engine was started with."""
    missing = sorted(set(reference.tensors) - set(weights.tensors))
    unknown = sorted(set(weights.tensors) - set(reference.tensors))
    if missing or unknown:
        raise ArtifactError(f"{who}: tensors do not match the engine's draft: missing {missing}, unknown {unknown}")
    for name, tensor in weights.tensors.items():
        expected = reference.tensors[name].shape
        if tensor.shape != expected:
            raise ArtifactError(f"{who}: {name} has shape {tuple(tensor.shape)}, the engine's draft has {tuple(expected)}")
    differing = sorted(
        key for key in weights.config.keys() | reference.config.keys() if weights.config.get(key) != reference.config.get(key)
    )
    if differing:
        raise ArtifactError(
            f"{who}: config.json differs in {differing}; a new geometry needs a new engine, restart it with this draft"
        )
