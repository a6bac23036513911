"""CaptureSpec: what hidden rows mean. One function resolves it; the engine checks it against the loaded model."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from msgspec import Struct

from wire.errors import ConfigError, SpecMismatch

SCHEMA_VERSION = 2
"""Stamped on every message, file and handshake. Raised when a change is not a new field with a default."""

_SIZES = ("num_hidden_layers", "vocab_size", "hidden_size")
_SAMPLE_BYTES = 64 * 1024
_SAMPLES_PER_FILE = 64


class CaptureSpec(Struct, frozen=True, kw_only=True, tag="capture_spec"):
    """What an engine captures and what a draft was trained on. Stamped on every sample and manifest.

    The draft-to-target vocabulary map is not part of it: head rows are copies of the target's, so the map is a
    property of each draft and travels, hashed, in its manifest.
    """

    target_id: str
    """Name of the target's directory."""
    target_revision: str
    """Digest over the target's weight files, see `weights_revision`."""
    tokenizer_sha256: str
    dtype: str
    """Of the captured rows, in torch's spelling without the prefix: `bfloat16`, `float16`, `float32`."""
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    aux_layer_ids: tuple[int, ...]
    """Residual stream after that many layers, as Hugging Face's `hidden_states[k]`."""

    def require(self, other: CaptureSpec, *, who: str) -> None:
        """Raise SpecMismatch naming every field in which `other` (which belongs to `who`) differs from this one."""
        differing = [name for name in self.__struct_fields__ if getattr(self, name) != getattr(other, name)]
        if differing:
            detail = "; ".join(f"{name}: {getattr(other, name)!r}, here {getattr(self, name)!r}" for name in differing)
            raise SpecMismatch(
                f"{who} belongs to another target or capture set-up ({detail}); use artifacts and samples made for this target"
            )


def resolve_capture_spec(
    target_dir: Path, *, dtype: str, draft_vocab_size: int, aux_layer_ids: tuple[int, ...] | None = None
) -> CaptureSpec:
    """The spec for a target directory; raises ConfigError where the directory is not a usable model."""
    config = read_model_config(target_dir)
    num_layers, vocab_size, hidden_size = (_size(config, key, target_dir) for key in _SIZES)
    aux = aux_layer_ids or default_aux_layer_ids(num_layers)
    if len(set(aux)) != len(aux) or not all(0 <= layer <= num_layers for layer in aux):
        raise ConfigError(
            f"aux_layer_ids {aux} do not name distinct layers of a target with {num_layers}; set draft.aux_layer_ids"
        )
    if not 0 < draft_vocab_size < vocab_size:
        raise ConfigError(
            f"draft.vocab_size must lie between 1 and {vocab_size - 1} (the target's vocabulary less one), got {draft_vocab_size}: "
            "with the full vocabulary vLLM shares the target's lm_head with the draft, and a swap would overwrite the target"
        )
    return CaptureSpec(
        target_id=target_dir.name,
        target_revision=weights_revision(target_dir),
        tokenizer_sha256=tokenizer_sha256(target_dir),
        dtype=dtype,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        aux_layer_ids=aux,
    )


def default_aux_layer_ids(num_layers: int) -> tuple[int, int, int]:
    """What EAGLE-3 reads of a target with so many layers where nothing else is said: (2, L//2, L-3).

    The authors' code takes these (SafeAILab/EAGLE, eagle/model/modeling_llama_kv.py), and so does vLLM
    (vllm/model_executor/models/interfaces.py).
    """
    return 2, num_layers // 2, num_layers - 3


def read_model_config(target_dir: Path) -> dict[str, Any]:
    """The parsed `config.json` of a Hugging Face directory; raises ConfigError."""
    path = target_dir / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{target_dir} is not a Hugging Face model directory: {path}: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{target_dir} is not a Hugging Face model directory: {path} holds no JSON object")
    return config


def _size(config: dict[str, Any], key: str, target_dir: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"{target_dir / 'config.json'} says {key} is {value!r}, a number above 0 is needed; use a text-only, Llama-like model"
        )
    return value


def tokenizer_sha256(target_dir: Path) -> str:
    """Of its `tokenizer.json`; `none` without one."""
    path = target_dir / "tokenizer.json"
    return file_sha256(path) if path.is_file() else "none"


def weights_revision(target_dir: Path) -> str:
    """Identity of a set of weights: sha256 over each safetensors file's name, size and 64 evenly spaced blocks.

    It tells fine-tunes apart at any model size in well under a second. It is an identity, not an integrity check:
    downloads are verified in full when they are made.
    """
    files = sorted(target_dir.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{target_dir} holds no *.safetensors file; convert the model to safetensors first")
    digest = hashlib.sha256()
    for path in files:
        size_bytes = path.stat().st_size
        digest.update(f"{path.name}:{size_bytes}\n".encode())
        with path.open("rb") as file:
            stride = max(size_bytes // _SAMPLES_PER_FILE, 1)
            for offset in range(0, size_bytes, stride):
                file.seek(offset)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def file_sha256(path: Path) -> str:
    """Hex sha256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync_path(path: Path) -> None:
    """Make the bytes of a file, or the renames inside a directory, durable; raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
