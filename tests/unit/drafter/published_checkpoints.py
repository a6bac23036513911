"""EAGLE-3 checkpoints as others publish them, and what such a draft computes, written out from the tensors' names alone.

Shape letters: T rows, N cached positions, D hidden, I width of the attention input (2 D), E head width, V target vocabulary,
U draft vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_target import AUX_LAYER_IDS, HIDDEN, NUM_AUX, VOCAB
from torch import Tensor

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, INTERMEDIATE, DRAFT_VOCAB = 8, 2, 6, 20, 32
EPS, THETA = 1e-6, 500_000.0
IDS = torch.arange(1, 2 * DRAFT_VOCAB, 2)
"""Target ids the drafts propose."""

LAYER: dict[str, Any] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": 1,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 2048,
    "rms_norm_eps": EPS,
    "tie_word_embeddings": False,
    "vocab_size": VOCAB,
    "attention_bias": False,
    "mlp_bias": False,
}


def layer_tensors(prefix: str, dtype: torch.dtype, *, bias: bool = False) -> dict[str, Tensor]:
    """Random weights of everything but the embedding."""
    generator = torch.Generator().manual_seed(11)

    def random(*shape: int, around: float = 0.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * 0.3 + around).to(dtype)

    queries, keys = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
    tensors = {
        "fc.weight": random(HIDDEN, NUM_AUX * HIDDEN),
        f"{prefix}input_layernorm.weight": random(HIDDEN, around=1.0),
        f"{prefix}hidden_norm.weight": random(HIDDEN, around=1.0),
        f"{prefix}post_attention_layernorm.weight": random(HIDDEN, around=1.0),
        f"{prefix}self_attn.q_proj.weight": random(queries, 2 * HIDDEN),
        f"{prefix}self_attn.k_proj.weight": random(keys, 2 * HIDDEN),
        f"{prefix}self_attn.v_proj.weight": random(keys, 2 * HIDDEN),
        f"{prefix}self_attn.o_proj.weight": random(HIDDEN, queries),
        f"{prefix}mlp.gate_proj.weight": random(INTERMEDIATE, HIDDEN),
        f"{prefix}mlp.up_proj.weight": random(INTERMEDIATE, HIDDEN),
        f"{prefix}mlp.down_proj.weight": random(HIDDEN, INTERMEDIATE),
        "norm.weight": random(HIDDEN, around=1.0),
        "lm_head.weight": random(DRAFT_VOCAB, HIDDEN),
        "d2t": IDS - torch.arange(DRAFT_VOCAB),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, IDS, True),
    }
    if bias:
        sizes = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": HIDDEN}
        tensors |= {f"{prefix}self_attn.{name}.bias": random(size) for name, size in sizes.items()}
    return tensors


def write(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: value.contiguous() for name, value in tensors.items()}, directory / "model.safetensors")
    return directory


def eagle_config(**changes: Any) -> dict[str, Any]:
    """As SafeAILab/EAGLE writes it: flat, no aux layers, the kind of rope by its theta."""
    return LAYER | {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": DRAFT_VOCAB, "rope_theta": THETA} | changes


def eagle_tensors(dtype: torch.dtype = torch.float16, **variants: bool) -> dict[str, Tensor]:
    return layer_tensors("midlayer.", dtype, **variants)


def speculators_config(*, layer: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """As vllm-project/speculators writes it."""
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": THETA}}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.6.0",
        "draft_vocab_size": DRAFT_VOCAB,
        "norm_before_residual": True,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": False,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": list(AUX_LAYER_IDS),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "tiny"},
        },
        "transformer_layer_config": LAYER | rope | (layer or {}),
    } | changes


def speculators_tensors(embedding_VD: Tensor, dtype: torch.dtype = torch.float32, **variants: bool) -> dict[str, Tensor]:
    return layer_tensors("layers.0.", dtype, **variants) | {"embed_tokens.weight": embedding_VD.to(dtype)}


def fc_norms() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(12)
    return {f"fc_norm.{aux}.weight": torch.rand(HIDDEN, generator=generator) + 0.5 for aux in range(NUM_AUX)}


def input_norm() -> dict[str, Tensor]:
    return {"input_norm.weight": torch.rand(NUM_AUX * HIDDEN, generator=torch.Generator().manual_seed(13)) + 0.5}


def _norm(x_D: Tensor, weight_D: Tensor) -> Tensor:
    return x_D / (x_D.square().mean() + EPS).sqrt() * weight_D


def _turn(x_E: Tensor, position: int) -> Tensor:
    half = HEAD_DIM // 2
    out_E = x_E.clone()
    for pair in range(half):
        angle = torch.tensor(position * THETA ** (-2.0 * pair / HEAD_DIM))
        first, second = x_E[pair], x_E[pair + half]
        out_E[pair] = first * angle.cos() - second * angle.sin()
        out_E[pair + half] = second * angle.cos() + first * angle.sin()
    return out_E


class PublishedDraft:
    """The forward of an EAGLE-3 checkpoint, one token at a time."""

    def __init__(self, tensors: dict[str, Tensor], embedding_VD: Tensor, **variants: bool) -> None:
        self.prefix = "layers.0." if "layers.0.hidden_norm.weight" in tensors else "midlayer."
        self.tensors = {name: value.float() for name, value in tensors.items()}
        self.embedding_VD = embedding_VD
        self.variants = variants
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def feature(self, aux_X: Tensor) -> Tensor:
        if self.variants.get("norm_before_fc"):
            aux_X = _norm(aux_X, self.tensors["input_norm.weight"])
        if self.variants.get("fc_norm"):
            parts = aux_X.split(HIDDEN)
            aux_X = torch.cat([_norm(part, self.tensors[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)])
        return self.tensors["fc.weight"] @ aux_X

    def step(self, token: int, hidden_D: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """(logits over the draft vocabulary, hidden state for the next step); the token's key and value stay."""
        normed_D = _norm(hidden_D, self._weight("hidden_norm"))
        residual_D = normed_D if self.variants.get("norm_before_residual") else hidden_D
        input_I = torch.cat([_norm(self.embedding_VD[token], self._weight("input_layernorm")), normed_D])
        queries = self._linear("self_attn.q_proj", input_I).view(NUM_HEADS, HEAD_DIM)
        keys = self._linear("self_attn.k_proj", input_I).view(NUM_KV_HEADS, HEAD_DIM)
        self.keys.append(torch.stack([_turn(key_E, position) for key_E in keys]))
        self.values.append(self._linear("self_attn.v_proj", input_I).view(NUM_KV_HEADS, HEAD_DIM))
        mixed = []
        for head in range(NUM_HEADS):
            shared = head // (NUM_HEADS // NUM_KV_HEADS)
            query_E = _turn(queries[head], position)
            weights_N = torch.stack([key[shared] @ query_E for key in self.keys]).div(HEAD_DIM**0.5).softmax(0)
            mixed.append(sum(weight * value[shared] for weight, value in zip(weights_N, self.values, strict=True)))
        hidden_D = residual_D + self._linear("self_attn.o_proj", torch.cat(mixed))
        x_D = _norm(hidden_D, self._weight("post_attention_layernorm"))
        gate = torch.nn.functional.silu(self._linear("mlp.gate_proj", x_D))
        prenorm_D = hidden_D + self._linear("mlp.down_proj", gate * self._linear("mlp.up_proj", x_D))
        output_D = _norm(prenorm_D, self.tensors["norm.weight"])
        return self.tensors["lm_head.weight"] @ output_D, output_D if self.variants.get("norm_output") else prenorm_D

    def _weight(self, name: str) -> Tensor:
        return self.tensors[f"{self.prefix}{name}.weight"]

    def _linear(self, name: str, x: Tensor) -> Tensor:
        bias = self.tensors.get(f"{self.prefix}{name}.bias")
        return self._weight(name) @ x + (0.0 if bias is None else bias)
