"""A random draft: day 0, before any traffic was seen.

Nothing of it is learned, but what the target knows is put to use: on code traffic this start reaches AL 1.48 after 12k token
visits, a plainly random layer at the same rate 1.39.

Shape letters: D hidden, V target vocabulary, J key/value heads, G query heads per key/value head, E head width,
W principal axes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from drafter.geometry import DraftGeometry
from drafter.model import DraftCore
from drafter.target import TargetParts

_WEIGHT_STD = 0.02
_FC_NOISE_STD = 0.002
_MLP_SCALE = 0.1
_MATCH_STD = 0.04
"""Of tied queries and keys: large enough that a position attends to itself most."""
_TOKEN_SCALE = -1.0
"""The token that is already known is taken out of the features, which predict it."""


def random_core(geometry: DraftGeometry, target: TargetParts, seed: int) -> DraftCore:
    """A core with a random layer that can already see its own token.

    - `fc` is the identity on the target's last aux block plus small noise, and the output norm is the target's, so nothing
      random stands between the features and the head.
    - The token embedding enters the layer through attention only. Queries start equal to their keys, so a position attends
      to itself, and values and output carry the embedding's principal directions.
    """
    generator = torch.Generator().manual_seed(seed)
    core = DraftCore(geometry)
    with torch.no_grad():
        for module in core.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0.0, _WEIGHT_STD, generator=generator)
                if module.bias is not None:
                    module.bias.zero_()
        core.midlayer.mlp.down_proj.weight.mul_(_MLP_SCALE)
        core.fc.weight.normal_(0.0, _FC_NOISE_STD, generator=generator)
        core.fc.weight[:, -geometry.hidden_size :] += torch.eye(geometry.hidden_size)
        core.norm.weight.copy_(target.norm_D.float())
        _attend_to_self(core, generator)
        _carry_token(core, target.embedding_VD)
    return core


def _attend_to_self(core: DraftCore, generator: torch.Generator) -> None:
    geometry, attention = core.geometry, core.midlayer.self_attn
    attention.k_proj.weight.normal_(0.0, _MATCH_STD, generator=generator)
    keys_JED = attention.k_proj.weight.view(geometry.num_kv_heads, geometry.head_dim, -1)
    group = geometry.num_heads // geometry.num_kv_heads
    attention.q_proj.weight.copy_(keys_JED.repeat_interleave(group, dim=0).flatten(0, 1))


def _carry_token(core: DraftCore, embedding_VD: Tensor) -> None:
    geometry, attention = core.geometry, core.midlayer.self_attn
    width = min(geometry.num_kv_heads * geometry.head_dim, geometry.hidden_size)
    axes_DW = _principal_axes(embedding_VD, width)
    attention.v_proj.weight.zero_()
    attention.v_proj.weight[:width, : geometry.hidden_size] = axes_DW.T
    group = geometry.num_heads // geometry.num_kv_heads
    back_DJE = torch.zeros(geometry.hidden_size, geometry.num_kv_heads * geometry.head_dim)
    back_DJE[:, :width] = axes_DW * (_TOKEN_SCALE / group)
    back_DJGE = back_DJE.view(geometry.hidden_size, geometry.num_kv_heads, 1, geometry.head_dim).expand(-1, -1, group, -1)
    attention.o_proj.weight.copy_(back_DJGE.reshape(geometry.hidden_size, -1))


def _principal_axes(embedding_VD: Tensor, count: int) -> Tensor:
    """The `count` leading principal axes of the normalised embedding rows, [D, count], signs made unique."""
    rows_VD = embedding_VD.float()
    rows_VD = rows_VD / rows_VD.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-6)
    axes_DW = torch.linalg.eigh(rows_VD.T @ rows_VD / rows_VD.shape[0]).eigenvectors[:, -count:]
    largest = axes_DW.abs().argmax(0)
    return axes_DW * axes_DW.gather(0, largest[None]).sign()
