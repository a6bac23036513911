"""A tiny target on disk and rows as an engine would capture them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from drafter.batch import UNKNOWN_TOKEN, RequestRows
from drafter.target import TargetParts, load_target_parts
from wire.spec import CaptureSpec, resolve_capture_spec

torch.set_num_threads(1)

VOCAB, HIDDEN = 64, 16
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


@pytest.fixture
def target_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "tiny-target"
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
def spec(target_dir: Path) -> CaptureSpec:
    return resolve_capture_spec(target_dir, dtype="float32", draft_vocab_size=32, aux_layer_ids=(1, 3, 5))


@pytest.fixture
def target(target_dir: Path) -> TargetParts:
    return load_target_parts(target_dir)


@pytest.fixture
def make_request() -> Callable[..., RequestRows]:
    def build(
        num_prompt: int, num_rows: int, *, seed: int = 0, missing: tuple[int, ...] = (), temperature: float = 0.0
    ) -> RequestRows:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, VOCAB, (num_rows + 1,), generator=generator)
        aux = torch.randn(num_rows, 3 * HIDDEN, generator=generator)
        hidden = torch.randn(num_rows, HIDDEN, generator=generator)
        kept = torch.tensor([position for position in range(num_rows) if position not in missing])
        next_tokens = tokens[1:].clone()
        for position in missing:
            if position > 0:
                next_tokens[position - 1] = UNKNOWN_TOKEN
        return RequestRows(kept, next_tokens[kept], aux[kept], hidden[kept], num_prompt, temperature)

    return build
