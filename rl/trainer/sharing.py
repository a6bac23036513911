"""Whether a model computes rollouts behind a shared prompt as it computes each of them alone. It is asked, once, with a small example.

Models of attention over all that came before do. Ones with a state (Mamba), with convolutions, or whose code makes its own mask do
not; ones that look back over a window do while it is not reached.

Shape letters: R rows, L tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_MAX_ERROR = 1e-3
"""Of a logit, by the spread of all. Another order of summation makes 1e-5 of it, a token seen that should not be about 1."""


@torch.no_grad()
def can_share_prompts(model: Any, device: torch.device, pack_tokens: int) -> bool:
    """Asked of a whole model, before it is sharded. False also where a pack may be longer than the model's window."""
    window = getattr(model.config, "sliding_window", None)
    if window is not None and window < pack_tokens:
        return False
    prompt, first, second = [3, 1, 4], [1, 5, 2], [2, 7]
    owners_L = torch.tensor([0] * len(prompt) + [1] * len(first) + [2] * len(second))
    sees_LL = ((owners_L == 0) | (owners_L[:, None] == owners_L)).tril()
    positions = [0, 1, 2, 3, 4, 5, 3, 4]
    try:
        shared = model(
            input_ids=torch.tensor([[*prompt, *first, *second]], device=device),
            position_ids=torch.tensor([positions], device=device),
            attention_mask=sees_LL[None, None].to(device),
            use_cache=False,
        )
    except (TypeError, ValueError, RuntimeError):  # a model that takes no such mask
        return False
    alone = model(input_ids=torch.tensor([[*prompt, *second]], device=device), use_cache=False)
    return _are_close(shared.logits[0, -len(second) :], alone.logits[0, -len(second) :])


def _are_close(one_LV: Tensor, other_LV: Tensor) -> bool:
    return float((one_LV - other_LV).abs().max()) < _MAX_ERROR * float(other_LV.std())
