"""A tiny target on disk and fixtures of it, shared by the tests of the drafter and of the learner."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from drafter.target import TargetParts, load_target_parts
from wire.spec import CaptureSpec, resolve_capture_spec

torch.set_num_threads(1)

VOCAB, HIDDEN, NUM_AUX = 64, 16, 3
AUX_LAYER_IDS = (1, 3, 5)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "num_hidden_layers": 6,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "eos_token_id": 60,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}


def write_target(directory: Path) -> Path:
    """Write the model to a new directory, which is returned; always the same weights."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    generator = torch.Generator().manual_seed(1)
    save_file(
        {
            "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator),
            "lm_head.weight": torch.randn(VOCAB, HIDDEN, generator=generator),
            "model.norm.weight": torch.rand(HIDDEN, generator=generator) + 0.5,
            "model.layers.0.input_layernorm.weight": torch.ones(HIDDEN),
        },
        directory / "model.safetensors",
    )
    return directory


@pytest.fixture
def target_dir(tmp_path: Path) -> Path:
    return write_target(tmp_path / "tiny-target")


@pytest.fixture
def target(target_dir: Path) -> TargetParts:
    return load_target_parts(target_dir)


@pytest.fixture
def spec(target_dir: Path, draft_vocab_size: int) -> CaptureSpec:
    return resolve_capture_spec(target_dir, dtype="float32", draft_vocab_size=draft_vocab_size, aux_layer_ids=AUX_LAYER_IDS)
