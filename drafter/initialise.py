"""A random draft: day 0, before any traffic was seen."""

from __future__ import annotations

import torch
from torch import nn

from drafter.geometry import DraftGeometry
from drafter.model import DraftCore
from drafter.target import TargetParts

_WEIGHT_STD = 0.02
_FC_NOISE_STD = 0.002


def random_core(geometry: DraftGeometry, target: TargetParts, seed: int) -> DraftCore:
    """A core whose layer is random and whose features start as the target's last aux layer.

    `fc` is the identity on the last aux block plus small noise and the output norm is the target's, so that the draft
    starts from "late target state -> target head" and nothing random stands before the head.
    """
    generator = torch.Generator().manual_seed(seed)
    core = DraftCore(geometry)
    with torch.no_grad():
        for module in core.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0.0, _WEIGHT_STD, generator=generator)
                if module.bias is not None:
                    module.bias.zero_()
        for closing in (core.midlayer.self_attn.o_proj, core.midlayer.mlp.down_proj):
            closing.weight.mul_(0.1)
        core.fc.weight.normal_(0.0, _FC_NOISE_STD, generator=generator)
        core.fc.weight[:, -geometry.hidden_size :] += torch.eye(geometry.hidden_size)
        core.norm.weight.copy_(target.norm_D.float())
    return core
