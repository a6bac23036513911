"""KvPrefix: the blocks of a prompt or a whole conversation, told as one for stores that cannot list what they hold."""

from __future__ import annotations

from hashlib import sha256

import msgspec
from msgspec import Struct

from wire.errors import FrameError
from wire.kv_block_format import KvRealm
from wire.spec import SCHEMA_VERSION

_CHECKSUM_BYTES = 32


class KvPrefix(Struct, frozen=True, kw_only=True):
    """The blocks of one prefix, in order."""

    schema_version: int = SCHEMA_VERSION
    model: str
    """The target's id."""
    layout_hash: str
    target_version: int
    tenant: str
    """As `tenant_label` gives it."""
    names: tuple[str, ...]
    """Of its blocks, in hex; the last one is the prefix's own."""
    num_ranks: int
    """Parts of each block."""
    part_bytes: int
    """Of the tensors in one part of one block."""

    @property
    def realm(self) -> KvRealm:
        return KvRealm(self.layout_hash, self.target_version, self.tenant)

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return len(self.names) * self.num_ranks * self.part_bytes


def encode_prefix(prefix: KvPrefix) -> bytes:
    """JSON after a checksum over it."""
    data = msgspec.json.encode(prefix)
    return sha256(data).digest() + data


def decode_prefix(data: bytes, name: str) -> KvPrefix:
    """The prefix of that name, whose every byte is as it was written; raises FrameError for any other."""
    checksum, text = data[:_CHECKSUM_BYTES], data[_CHECKSUM_BYTES:]
    if sha256(text).digest() != checksum:
        raise FrameError(f"the checksum of prefix {name} does not match its bytes")
    try:
        prefix = msgspec.json.decode(text, type=KvPrefix)
    except (msgspec.DecodeError, RecursionError) as error:
        raise FrameError(f"prefix {name} is not one: {error}") from None
    if prefix.schema_version != SCHEMA_VERSION:
        raise FrameError(f"prefix {name} is of schema {prefix.schema_version}, this is {SCHEMA_VERSION}")
    if prefix.names[-1:] != (name,):
        raise FrameError(f"prefix {name} is another one, which ends with {prefix.names[-1:]}")
    return prefix
