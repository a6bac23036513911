"""Small but whole KV block files of one prefix."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from wire.kv_block_format import METADATA_KEY, KvBlockHeader, KvRealm
from wire.kv_blocks import prompt_chain, root_name
from wire.kv_files import KvDirectory
from wire.spec import SCHEMA_VERSION

BLOCK_TOKENS = 4
REALM = KvRealm("0123456789abcdef", 0, "default")


def names_of(num_blocks: int, *, salt: str | None = None, first_token: int = 0) -> list[str]:
    token_ids = range(first_token, first_token + num_blocks * BLOCK_TOKENS)
    return [name.hex() for name in prompt_chain(token_ids, BLOCK_TOKENS, salt)]


def header(names: list[str], position: int, realm: KvRealm = REALM) -> KvBlockHeader:
    return KvBlockHeader(
        schema_version=SCHEMA_VERSION,
        model="tiny",
        layout_hash=realm.layout_hash,
        target_version=realm.target_version,
        tenant=realm.tenant,
        name=names[position],
        parent=names[position - 1] if position else root_name(BLOCK_TOKENS).hex(),
        position=position,
        rank=0,
    )


def file_bytes(what: KvBlockHeader, num_bytes: int = 64) -> bytes:
    """A safetensors file of one uint8 tensor, not sealed yet."""
    tensors = {
        "__metadata__": {METADATA_KEY: msgspec.json.encode(what).decode()},
        "layer": {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]},
    }
    encoded = msgspec.json.encode(tensors)
    return len(encoded).to_bytes(8, "little") + encoded + bytes(range(num_bytes))


def store_prefix(
    directory: KvDirectory, names: list[str], *, realm: KvRealm = REALM, used_at_s: float | None = None
) -> list[Path]:
    """Write the blocks of a prefix that are not there yet; returns the files of all."""
    paths = [directory.block_path(realm, name, 0) for name in names]
    for position, path in enumerate(paths):
        if not path.exists():
            directory.write(path, file_bytes(header(names, position, realm)))
            if used_at_s is not None:
                os.utime(path, (used_at_s, used_at_s))
    return paths
