"""A tiny target on disk, shared by the tests of the drafter and of the learner."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

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
