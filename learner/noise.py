"""Noise on the target's features in training. Each request has its own, so that it does not depend on how a batch is shared out.

Shape letters: T rows, X aux layers times D, D hidden.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import torch

from drafter.batch import Batch


def noisy(batch: Batch, keys: Sequence[str], *, num_aux: int, share: float, seed: str) -> Batch:
    """The batch with Gaussian noise of this share of the root mean square of each row and layer; `keys` name its requests.

    The same for the same seed and keys.
    """
    if share == 0:
        return batch
    noise_TX = torch.cat(
        [
            torch.randn(bounds.row_end - bounds.row_start, batch.aux_TX.shape[1], generator=_generator(f"{seed} {key}"))
            for bounds, key in zip(batch.bounds, keys, strict=True)
        ]
    )
    layers = batch.aux_TX.float().view(batch.aux_TX.shape[0], num_aux, -1)
    scale = layers.square().mean(-1, keepdim=True).sqrt() * share
    noised = layers + noise_TX.view_as(layers) * scale
    return replace(batch, aux_TX=noised.view_as(batch.aux_TX).to(batch.aux_TX.dtype))


def _generator(name: str) -> torch.Generator:
    digest = hashlib.sha256(name.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
