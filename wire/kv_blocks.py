"""Names of KV blocks: what the gateway's index, the engines' KV store and the admin API call the prefix of a prompt.

A block is named by the hash of its parent's name, its extra keys and its tokens, so a name stands for the whole prefix
that ends with the block. The names an engine publishes depend on its settings; ours are equal for equal content.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import chain, repeat
from typing import Any

import msgspec

BlockName = bytes
"""16 bytes."""

NAME_BYTES = 16
_encode_keys = msgspec.msgpack.Encoder().encode


def root_name(block_size_tokens: int) -> BlockName:
    """The parent of every first block; chains of different block sizes never meet."""
    return block_size_tokens.to_bytes(NAME_BYTES, "little")


def is_root(name: BlockName) -> bool:
    """Whether a name is the parent of first blocks; a hash looks like one about once in 2^96 names."""
    return name[4:] == bytes(NAME_BYTES - 4)


def extend_chain(
    parent: BlockName, token_ids: Sequence[int], block_size_tokens: int, extra_keys: Iterable[Any] = ()
) -> Iterator[BlockName]:
    """Names of the whole blocks of `token_ids` that follow `parent`.

    `extra_keys` has one entry a block, None where the engine mixed nothing else into it; missing entries are None.
    """
    data = memoryview(array("q", token_ids)).cast("B")
    width = block_size_tokens * 8
    for start, keys in zip(range(0, len(data) - width + 1, width), chain(extra_keys, repeat(None)), strict=False):
        digest = blake2b(parent, digest_size=NAME_BYTES)
        digest.update(data[start : start + width])
        if keys is not None:
            digest.update(_encode_keys(keys))
        parent = digest.digest()
        yield parent


def prompt_chain(token_ids: Sequence[int], block_size_tokens: int, salt: str | None) -> list[BlockName]:
    """Names of a prompt's whole blocks. A cache salt is an extra key of the first block."""
    return list(extend_chain(root_name(block_size_tokens), token_ids, block_size_tokens, [[salt]] if salt else ()))
