"""Rotary position embedding, in the half-split (NeoX) layout Llama and its EAGLE-3 drafts use.

Shape letters: T rows, H heads, E head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafter.geometry import DraftGeometry

_PLAIN = ("default", None)


class Rope:
    """Angles for a geometry. Plain rope is computed here; scaled kinds come from transformers, which owns their formulas."""

    def __init__(self, geometry: DraftGeometry) -> None:
        rope = dict(geometry.rope.get("rope_parameters") or geometry.rope.get("rope_scaling") or {})
        kind = rope.get("rope_type", rope.get("type"))
        theta = float(rope.get("rope_theta") or geometry.rope.get("rope_theta") or 10000.0)
        self.scale = 1.0
        if kind in _PLAIN:
            exponents = torch.arange(0, geometry.head_dim, 2, dtype=torch.float64) / geometry.head_dim
            self.frequencies = (1.0 / theta**exponents).float()
        else:
            self.frequencies, self.scale = _scaled_frequencies(geometry)

    def table(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [T, 1, E/2] in float32."""
        angles = positions_T.float()[:, None, None] * self.frequencies.to(positions_T.device)
        return angles.cos() * self.scale, angles.sin() * self.scale


def rotate(x_THE: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate queries or keys [T, H, E]; computed in float32, returned in the input's dtype."""
    cos, sin = table
    first, second = x_THE.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_THE.dtype)


def _scaled_frequencies(geometry: DraftGeometry) -> tuple[Tensor, float]:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=geometry.hidden_size,
        num_attention_heads=geometry.num_heads,
        head_dim=geometry.head_dim,
        max_position_embeddings=geometry.max_positions,
        **geometry.rope,
    )
    embedding = LlamaRotaryEmbedding(config)
    return embedding.inv_freq.float(), float(embedding.attention_scaling)
