"""The draft forward as the engine does it: token by token, with a KV cache. Slow and obvious; tests hold the fast one to it.

Shape letters: T rows, N cached positions, D hidden, X aux layers times D, I width of the attention input (2 D), V target
vocabulary, H heads, J key/value heads, E head width.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from drafter.batch import UNKNOWN_TOKEN, RequestRows
from drafter.model import DraftCore
from drafter.rope import rotate


@dataclass
class KvCache:
    """Keys and values, one [J, E] tensor each a cached position."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def copy(self) -> KvCache:
        return KvCache(list(self.keys), list(self.values))


def draft_step(core: DraftCore, embed_D: Tensor, hidden_D: Tensor, position: int, cache: KvCache) -> tuple[Tensor, Tensor]:
    """One token through the layer, its key and value appended to `cache`: (output for the head, next hidden state), both [D]."""
    geometry, layer = core.geometry, core.midlayer
    normed_D = layer.hidden_norm(hidden_D)
    residual_D = normed_D if geometry.norm_before_residual else hidden_D
    input_I = torch.cat((layer.input_layernorm(embed_D), normed_D))
    table = core.rope.table(torch.tensor([position]))
    query_HE = rotate(layer.self_attn.q_proj(input_I).view(1, geometry.num_heads, geometry.head_dim), table)[0]
    key_JE = rotate(layer.self_attn.k_proj(input_I).view(1, geometry.num_kv_heads, geometry.head_dim), table)[0]
    cache.keys.append(key_JE)
    cache.values.append(layer.self_attn.v_proj(input_I).view(geometry.num_kv_heads, geometry.head_dim))
    heads = []
    for head in range(geometry.num_heads):
        shared = head * geometry.num_kv_heads // geometry.num_heads
        keys_NE = torch.stack([key_JE[shared] for key_JE in cache.keys])
        values_NE = torch.stack([value_JE[shared] for value_JE in cache.values])
        weights_N = torch.softmax(keys_NE @ query_HE[head] / geometry.head_dim**0.5, dim=0)
        heads.append(weights_N @ values_NE)
    hidden_D = residual_D + layer.self_attn.o_proj(torch.cat(heads))
    x_D = layer.post_attention_layernorm(hidden_D)
    mlp = layer.mlp
    prenorm_D = hidden_D + mlp.down_proj(functional.silu(mlp.gate_proj(x_D)) * mlp.up_proj(x_D))
    output_D = core.norm(prenorm_D)
    return output_D, output_D if geometry.norm_output else prenorm_D


def unroll_anchor(core: DraftCore, embedding_VD: Tensor, request: RequestRows, row: int, tokens: list[int]) -> list[Tensor]:
    """Head inputs [D] of one anchor at depths 0..len(tokens)-1; `tokens` are the inputs of the steps, tokens[0] that of p+1."""
    cache = KvCache()
    positions, next_tokens = request.positions_T.tolist(), request.next_tokens_T.tolist()
    for earlier in range(row):
        if next_tokens[earlier] != UNKNOWN_TOKEN:
            feature_D = core.combine(request.aux_TX[earlier])
            draft_step(core, embedding_VD[next_tokens[earlier]], feature_D, positions[earlier], cache)
    hidden_D = core.combine(request.aux_TX[row])
    outputs = []
    for depth, token in enumerate(tokens):
        output_D, hidden_D = draft_step(core, embedding_VD[token], hidden_D, positions[row] + depth, cache)
        outputs.append(output_D)
    return outputs
