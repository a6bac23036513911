"""One block's KV as bytes: a safetensors file with one tensor per layer, the draft's included, sealed with a checksum."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import torch
from safetensors.torch import load, save

from wire.errors import FrameError
from wire.kv_block_format import METADATA_KEY, KvBlockHeader, check

LayerTensors = dict[str, torch.Tensor]
"""By layer name: that layer's part of one block, in host memory."""


def encode_block(tensors: LayerTensors, header: KvBlockHeader) -> bytes:
    """A block file's bytes, not sealed yet."""
    return save(tensors, {METADATA_KEY: msgspec.json.encode(header).decode()})


def decode_block(data: bytes, expected: KvBlockHeader, like: Mapping[str, torch.Tensor]) -> LayerTensors:
    """The tensors of a whole, unaltered file that is the block expected and fits a cache block of `like`.

    Raises WireError for any other: what it returns is what was saved, bit for bit.
    """
    header = check(data)
    if msgspec.structs.replace(header, sha256=expected.sha256) != expected:
        raise FrameError(f"the file holds another block: {header}")
    tensors = load(data)
    if {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()} != {
        name: (tensor.dtype, tensor.shape) for name, tensor in like.items()
    }:
        raise FrameError("the file's layers are not those of this engine's cache")
    return tensors
