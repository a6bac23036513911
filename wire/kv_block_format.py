"""One rank's part of a KV block as bytes, wherever it is kept: a safetensors file that tells its identity, sealed with a checksum.

What it holds besides is `server/engine/kv_store_blocks.py`'s to know.
"""

from __future__ import annotations

import re
from hashlib import blake2b, sha256
from typing import BinaryIO, NamedTuple

import msgspec
from msgspec import Struct

from wire.errors import FrameError
from wire.spec import SCHEMA_VERSION

METADATA_KEY = "paceline_kv"
BLANK_SHA256 = "0" * 64
"""Stands in a file for its checksum while that is computed."""

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 1 << 20
_PLAIN_TENANT = re.compile(r"[A-Za-z0-9._:-]{1,64}")


class KvRealm(NamedTuple):
    """What KV blocks must agree on before one may follow another."""

    layout_hash: str
    """16 hex digits."""
    target_version: int
    tenant: str
    """As `tenant_label` gives it."""


def tenant_label(tenant: str) -> str:
    """The tenant itself where it is a plain label; any other name by its digest, which no plain label looks like."""
    if _PLAIN_TENANT.fullmatch(tenant) and tenant != BLANK_SHA256:  # a header must hold that in one place only
        return tenant
    return f"~{blake2b(tenant.encode(), digest_size=16).hexdigest()}"


class KvBlockHeader(Struct, frozen=True, kw_only=True):
    """Identity of one rank's part of a block, JSON under `paceline_kv` in its safetensors metadata."""

    schema_version: int
    model: str
    """The target's id."""
    layout_hash: str
    target_version: int
    tenant: str
    name: str
    """Of the block, in hex, and so of the prefix that ends with it."""
    parent: str
    """Name of the block before it, in hex."""
    position: int
    """Blocks before it in its prefix."""
    rank: int
    sha256: str = BLANK_SHA256
    """Over the whole file with this field blank."""

    @property
    def realm(self) -> KvRealm:
        return KvRealm(self.layout_hash, self.target_version, self.tenant)


def seal(data: bytes) -> bytes:
    """A block file's bytes with the checksum in place of the blank."""
    return data.replace(BLANK_SHA256.encode(), sha256(data).hexdigest().encode(), 1)


def check(data: bytes) -> KvBlockHeader:
    """The header of a sealed file whose every byte is as it was written; raises WireError for any other."""
    header = _parse_header(data)
    blank = data.replace(header.sha256.encode(), BLANK_SHA256.encode(), 1)
    if sha256(blank).hexdigest() != header.sha256:
        raise FrameError("the checksum of the block does not match its bytes")
    return header


def read_header(file: BinaryIO) -> KvBlockHeader:
    """A file's own word on what it is, its checksum not verified; raises OSError or WireError."""
    start = file.read(_LENGTH_BYTES)
    return _parse_header(start + file.read(min(int.from_bytes(start, "little"), _MAX_HEADER_BYTES)))


def block_bytes_bound(tensor_bytes: int) -> int:
    """What a block with that many bytes of tensors takes at most."""
    return _LENGTH_BYTES + _MAX_HEADER_BYTES + tensor_bytes


def _parse_header(data: bytes) -> KvBlockHeader:
    end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    if not _LENGTH_BYTES < end <= min(len(data), _LENGTH_BYTES + _MAX_HEADER_BYTES):
        raise FrameError(f"a header that ends at byte {end} of {len(data)}")
    try:
        tensors = msgspec.json.decode(data[_LENGTH_BYTES:end], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(tensors.get("__metadata__", msgspec.Raw(b"{}")), type=dict[str, str])
        header = msgspec.json.decode(metadata.get(METADATA_KEY, ""), type=KvBlockHeader)
    except (msgspec.DecodeError, RecursionError) as error:
        raise FrameError(f"not a KV block file: {error}") from None
    if header.schema_version != SCHEMA_VERSION or len(header.sha256) != len(BLANK_SHA256):
        raise FrameError(f"a KV block of schema {header.schema_version}, this is {SCHEMA_VERSION}")
    return header
