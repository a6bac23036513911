"""TargetLoader: reads a version of the target and refuses everything the engine could not swap in safely."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from server.engine.stage import StagedWeights
from wire.artifact import WEIGHTS_FILE
from wire.errors import ArtifactError
from wire.spec import CaptureSpec, weights_revision
from wire.target import BASE_VERSION, TargetStore

MAX_HELD = 3
"""Version in force, the one before it and the next; their tensors are mapped files, which the kernel may drop from memory."""
_INDEX_FILE = "model.safetensors.index.json"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The model's loader turns any of them into the engine's own."""


class TargetLoader:
    """Names and shapes are those of version 0, the directory that the engine was started with."""

    def __init__(self, store: TargetStore, spec: CaptureSpec, target_dir: Path) -> None:
        self._store = store
        self._spec = spec
        self._target_dir = target_dir
        self._shapes: dict[str, tuple[int, ...]] = {}
        """Of version 0, once they were read."""

    def __call__(self, version: int) -> StagedWeights:
        """Raises ArtifactError or SpecMismatch."""
        if version == BASE_VERSION:
            return self._read_base()
        manifest = self._store.verify(version)
        manifest.require_base(self._spec)
        try:
            tensors = load_file(self._store.weights(version))
        except (OSError, SafetensorError) as error:
            raise ArtifactError(f"target {version}: unreadable: {error}") from error
        self._shapes = self._shapes or read_shapes(self._target_dir)
        check_tensors(tensors, self._shapes, who=f"target {version}")
        return StagedWeights(tensors, {}, manifest.sha256[WEIGHTS_FILE])

    def _read_base(self) -> StagedWeights:
        if weights_revision(self._target_dir) != self._spec.target_revision:
            raise ArtifactError(
                f"the files in {self._target_dir} are not those this engine was started with; there is no way back to target 0, "
                "put them back"
            )
        tensors: dict[str, torch.Tensor] = {}
        try:
            for path in weight_files(self._target_dir):
                tensors |= load_file(path)
        except (OSError, SafetensorError) as error:
            raise ArtifactError(f"target 0 in {self._target_dir}: unreadable: {error}") from error
        return StagedWeights(tensors, {})


def weight_files(target_dir: Path) -> list[Path]:
    """The safetensors files a model is loaded from; raises ArtifactError.

    Where there is an index only those it names count: a directory may hold the same weights twice.
    """
    index = target_dir / _INDEX_FILE
    if not index.is_file():
        return sorted(target_dir.glob("*.safetensors"))
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ArtifactError(f"{index} is no index of weights: {error!r}") from error
    return sorted(target_dir / name for name in names)


def read_shapes(target_dir: Path) -> dict[str, tuple[int, ...]]:
    """Shapes by tensor name, from the files' headers; raises ArtifactError."""
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        for path in weight_files(target_dir):
            with safe_open(path, framework="pt") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 -- no mapping
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"target 0 in {target_dir}: unreadable: {error}") from error
    return shapes


def check_tensors(tensors: dict[str, torch.Tensor], shapes: dict[str, tuple[int, ...]], *, who: str) -> None:
    """Raise ArtifactError for names, shapes or dtypes that do not fit, and for what is no finite number.

    All tensors of version 0, and no others: a part of a fused layer alone would spoil its other parts.
    """
    missing, unknown = sorted(shapes.keys() - tensors.keys()), sorted(tensors.keys() - shapes.keys())
    if missing or unknown:
        raise ArtifactError(f"{who}: tensors are not those of target 0: missing {missing[:8]}, unknown {unknown[:8]}")
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != shapes[name]:
            raise ArtifactError(f"{who}: {name} has shape {tuple(tensor.shape)}, target 0 has {shapes[name]}")
        if tensor.dtype not in _DTYPES:
            raise ArtifactError(f"{who}: {name} is {tensor.dtype}; write float32, bfloat16 or float16")
        if not torch.isfinite(tensor).all():
            raise ArtifactError(f"{who}: {name} holds NaN or infinite values")
