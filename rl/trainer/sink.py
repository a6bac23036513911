"""Where target versions go: anything that takes weights and gives them a number; here the store that engines read (`wire/target.py`).

A version is complete once it has its name: written aside, flushed, renamed, the manifest with checksum and canary last. Nobody computes
with it until the gateway is asked for it (`rl/run/updates.py`).

A run that was killed after that makes the same weights again. They keep the number they have: another one would leave a gap, and a
gap makes rollouts that wait look a version older than they are.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Protocol

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from wire.artifact import WEIGHTS_FILE, write_manifest
from wire.errors import ArtifactError, TrainerError
from wire.spec import SCHEMA_VERSION, file_sha256, fsync_path, tokenizer_sha256, weights_revision
from wire.target import BASE_VERSION, TargetCanary, TargetManifest, TargetStore

MAX_CANARY_ERRORS = {"float32": 1e-4, "bfloat16": 0.1}
"""Nats a token, by the dtype of trainer and engines: about 25 and 4 times what equal weights are apart (`rl/consistency/alarms.py`)."""


class TargetSink(Protocol):
    @property
    def canary_token_ids(self) -> tuple[int, ...]:
        """A text whose log-probabilities go with each version, so that engines can prove that they serve it; empty: none."""
        ...

    def write(self, state: Mapping[str, Tensor], canary_logprobs: Sequence[float], *, num_updates: int) -> int:
        """Make the weights durable as the next version, all or nothing, and return its number.

        state: every tensor of the model's own files by its name there, on the CPU, in the engines' dtype. canary_logprobs: of each
        token of the canary but the first, at temperature 1. num_updates: optimiser steps since the model's own weights.
        """
        ...


class _IsThere(Exception):
    """The weights have a number already."""

    def __init__(self, version: int) -> None:
        super().__init__(version)
        self.version = version


class StoreSink:
    """The store of a system's targets. model_dir: version 0, which the policy began as. canary_token_ids: two or more.

    dtype: the engines', in which the weights are written. Raises ConfigError where the directory has no weights.
    """

    def __init__(self, store: TargetStore, model_dir: Path, *, canary_token_ids: Sequence[int], dtype: str) -> None:
        self.store = store
        self.canary_token_ids = tuple(canary_token_ids)
        self._max_error = MAX_CANARY_ERRORS[dtype]
        self._target_id = model_dir.name
        self._base_revision = weights_revision(model_dir)
        self._tokenizer_sha256 = tokenizer_sha256(model_dir)

    def write(self, state: Mapping[str, Tensor], canary_logprobs: Sequence[float], *, num_updates: int) -> int:
        """Raises OSError on a full disk, nothing of the version is left then; TrainerError for a policy that is not finite."""
        canary = self._canary(canary_logprobs)
        active = self.store.active()
        parent = BASE_VERSION if active is None else active

        def fill(directory: Path, version: int) -> None:
            path = directory / WEIGHTS_FILE
            try:
                save_file({name: tensor.contiguous() for name, tensor in state.items()}, path, metadata={"format": "pt"})
            except SafetensorError as error:
                raise OSError(f"cannot write target {version}: {error}") from error
            fsync_path(path)
            sha256 = {WEIGHTS_FILE: file_sha256(path)}
            self._require_new(sha256, parent=parent, num_updates=num_updates)
            manifest = TargetManifest(
                schema_version=SCHEMA_VERSION,
                version=version,
                parent=parent,
                created_at_s=time.time(),
                sha256=sha256,
                target_id=self._target_id,
                base_revision=self._base_revision,
                tokenizer_sha256=self._tokenizer_sha256,
                canary=canary,
                num_steps=num_updates,
            )
            write_manifest(directory, manifest)

        try:
            return self.store.publish(fill)
        except _IsThere as there:
            return there.version

    def _require_new(self, sha256: dict[str, str], *, parent: int, num_updates: int) -> None:
        """Raises _IsThere where these weights are the newest version, which nobody has computed with since."""
        newest = max(self.store.versions(), default=BASE_VERSION)
        try:
            found = self.store.manifest(newest) if newest > parent else None
        except ArtifactError:
            return  # a damaged version is none
        if found is not None and (found.sha256, found.parent, found.num_steps) == (sha256, parent, num_updates):
            raise _IsThere(newest)

    def prune(self, num_kept: int) -> list[int]:
        """Remove all but the newest versions; the active one and the one before it stay. Returns what went.

        Raises ArtifactError where the active one cannot be read.
        """
        return self.store.prune(num_kept)

    def _canary(self, logprobs: Sequence[float]) -> TargetCanary:
        if not all(map(isfinite, logprobs)):
            raise TrainerError(
                "the policy's log-probabilities of the canary are not all finite, and it is not written; go back to a checkpoint "
                "and train with a lower learning_rate"
            )
        rounded = tuple(min(value, 0.0) for value in logprobs)  # a certain token is a rounding above 0
        return TargetCanary(token_ids=self.canary_token_ids, logprobs=rounded, max_mean_error=self._max_error)
