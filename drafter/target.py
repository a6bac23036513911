"""TargetParts: the three frozen tensors of the target that a draft uses, read straight from its safetensors.

Shape letters: V target vocabulary, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from wire.errors import ConfigError
from wire.spec import read_model_config

_EMBEDDING = "embed_tokens.weight"
_HEAD = "lm_head.weight"
_NORMS = ("model.norm.weight", "language_model.norm.weight", "norm.weight")


@dataclass(frozen=True)
class TargetParts:
    """Embedding [V, D], output head [V, D] and final norm [D], in the target's dtype. With tied weights head is embedding."""

    embedding_VD: Tensor
    head_VD: Tensor
    norm_D: Tensor


def load_target_parts(target_dir: Path) -> TargetParts:
    """Read the parts; raises ConfigError where the directory lacks one of them. Hidden rows are captured after the norm."""
    config = read_model_config(target_dir)
    names = _tensor_files(target_dir)
    embedding = _read(names, _only(names, _EMBEDDING, target_dir))
    head_names = [name for name in names if name.endswith(_HEAD)]
    head = _read(names, head_names[0]) if head_names and not config.get("tie_word_embeddings", False) else embedding
    norm_names = [name for suffix in _NORMS for name in names if name == suffix or name.endswith("." + suffix)]
    norm_names = [name for name in norm_names if ".layers." not in name]
    if not norm_names:
        raise ConfigError(f"{target_dir} holds no final norm (model.norm.weight)")
    return TargetParts(embedding_VD=embedding, head_VD=head, norm_D=_read(names, norm_names[0]))


def _tensor_files(target_dir: Path) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for path in sorted(target_dir.glob("*.safetensors")):
        with safe_open(path, framework="pt") as opened:
            files.update(dict.fromkeys(opened.keys(), path))
    if not files:
        raise ConfigError(f"{target_dir} holds no *.safetensors file; convert the model to safetensors first")
    return files


def _only(names: dict[str, Path], suffix: str, target_dir: Path) -> str:
    found = [name for name in names if name.endswith(suffix)]
    if len(found) != 1:
        raise ConfigError(f"{target_dir} holds {len(found)} tensors named *{suffix}, one is needed")
    return found[0]


def _read(names: dict[str, Path], name: str) -> Tensor:
    with safe_open(names[name], framework="pt") as opened:
        tensor: Tensor = opened.get_tensor(name)
    if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ConfigError(f"{name} of the target has dtype {tensor.dtype}; a quantised embedding or head is not supported")
    return tensor
