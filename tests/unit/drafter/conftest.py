"""A tiny target on disk and rows as an engine would capture them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from drafter.batch import UNKNOWN_TOKEN, RequestRows

sys.path.insert(0, str(Path(__file__).parent))

from tiny_target import HIDDEN, NUM_AUX, VOCAB, spec, target, target_dir

__all__ = ["spec", "target", "target_dir"]


@pytest.fixture
def draft_vocab_size() -> int:
    return 32


@pytest.fixture
def make_request() -> Callable[..., RequestRows]:
    def build(
        num_prompt: int, num_rows: int, *, seed: int = 0, missing: tuple[int, ...] = (), temperature: float = 0.0
    ) -> RequestRows:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, VOCAB, (num_rows + 1,), generator=generator)
        aux = torch.randn(num_rows, NUM_AUX * HIDDEN, generator=generator)
        hidden = torch.randn(num_rows, HIDDEN, generator=generator)
        kept = torch.tensor([position for position in range(num_rows) if position not in missing])
        next_tokens = tokens[1:].clone()
        for position in missing:
            if position > 0:
                next_tokens[position - 1] = UNKNOWN_TOKEN
        return RequestRows(kept, next_tokens[kept], aux[kept], hidden[kept], num_prompt, temperature)

    return build
