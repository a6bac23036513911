"""A tiny target on disk and rows as an engine would capture them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from drafter.batch import UNKNOWN_TOKEN, RequestRows
from drafter.target import TargetParts, load_target_parts
from wire.spec import CaptureSpec, resolve_capture_spec

sys.path.insert(0, str(Path(__file__).parent))

from tiny_target import AUX_LAYER_IDS, HIDDEN, NUM_AUX, VOCAB, write_target

torch.set_num_threads(1)


@pytest.fixture
def target_dir(tmp_path: Path) -> Path:
    return write_target(tmp_path / "tiny-target")


@pytest.fixture
def target(target_dir: Path) -> TargetParts:
    return load_target_parts(target_dir)


@pytest.fixture
def spec(target_dir: Path) -> CaptureSpec:
    return resolve_capture_spec(target_dir, dtype="float32", draft_vocab_size=32, aux_layer_ids=AUX_LAYER_IDS)


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
