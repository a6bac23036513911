"""Functional digest of a model: parameters, buffers and what every linear layer makes of a fixed input.

On the CPU vLLM packs linear weights away and leaves empty parameters, so a digest over parameters alone is blind.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

_NUM_ROWS = 4
_NUM_SAMPLES = 4096
"""Values of one parameter that the quick digest looks at."""


def _fixed_input(width: int, like: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(width)
    return torch.randn(_NUM_ROWS, width, generator=generator).to(like.dtype).to(like.device)


def _feed(digest: hashlib._Hash, name: str, tensor: torch.Tensor) -> None:
    digest.update(name.encode())
    digest.update(tensor.detach().reshape(-1).contiguous().cpu().view(torch.uint8).numpy().tobytes())


def model_digest(model: torch.nn.Module, dtype: torch.dtype, device: torch.device) -> str:
    """Hex digest; equal for equal weights on the same machine and build."""
    return _digest(model, dtype, device, every=lambda tensor: tensor)


def quick_digest(model: torch.nn.Module, dtype: torch.dtype, device: torch.device) -> str:
    """As `model_digest`, but with evenly spaced values of each parameter: as fast as one forward of four tokens.

    What every linear layer makes of a fixed input is in it whole, so it sees every weight but those of embeddings and norms.
    """
    return _digest(model, dtype, device, every=_samples)


def _samples(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: max(flat.numel() // _NUM_SAMPLES, 1)]


@torch.inference_mode()
def _digest(
    model: torch.nn.Module, dtype: torch.dtype, device: torch.device, *, every: Callable[[torch.Tensor], torch.Tensor]
) -> str:
    digest = hashlib.sha256()
    like = torch.empty(0, dtype=dtype, device=device)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.numel() and not tensor.is_meta:
            _feed(digest, name, every(tensor))
    for name, module in model.named_modules():
        if isinstance(module, ParallelLMHead):
            _feed(digest, name, module.quant_method.apply(module, _fixed_input(module.embedding_dim, like), bias=None))
        elif isinstance(module, LinearBase):
            output = module(_fixed_input(getattr(module, "input_size_per_partition", module.input_size), like))
            _feed(digest, name, output[0] if isinstance(output, tuple) else output)
    return digest.hexdigest()[:32]
