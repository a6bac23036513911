"""DfkvBlocks: KV of finished conversations in DFKV, one value per block and rank, and one per prompt and per conversation.

    <layout hash>/<target version>/<tenant>/<block name>.<rank>     a part as `kv_block_format` has it, sealed
    prefix/<name of its last block>.<slot>                          a `KvPrefix`: DFKV cannot tell what it holds

Layout, target version and tenant are in a block's key and in its value. Any number of engines and gateways may share the
servers, which bound what they hold and drop the least recently used.
"""

from __future__ import annotations

from collections.abc import Sequence

from wire.dfkv import DfkvClient
from wire.errors import FrameError
from wire.kv_block_format import KvBlockHeader, KvRealm, block_bytes_bound, seal
from wire.kv_prefix import KvPrefix, decode_prefix, encode_prefix

NUM_SLOTS = 8
"""Realms that may end with one and the same prefix; of further ones the blocks are kept and found by engines, but not located."""
_MAX_PREFIX_BYTES = 1 << 22
"""About 100 000 blocks."""


class DfkvBlocks:
    """Methods that write raise ConnectionError, an OSError, where DFKV does not do it; to the others it then is empty."""

    def __init__(self, client: DfkvClient) -> None:
        self._client = client

    def has(self, realm: KvRealm, names: Sequence[str], num_ranks: int) -> list[bool]:
        """By name, whether every rank's part is there."""
        found = self._client.exist([_block_key(realm, name, rank) for name in names for rank in range(num_ranks)])
        return [all(found[start : start + num_ranks]) for start in range(0, len(found), num_ranks)]

    def has_part(self, header: KvBlockHeader) -> bool:
        return self._client.exist([_header_key(header)]) == [True]

    def read(self, header: KvBlockHeader, *, tensor_bytes: int) -> bytes:
        """The bytes of a value that may be the block, unchecked; raises FileNotFoundError."""
        data = self._client.get(_header_key(header), block_bytes_bound(tensor_bytes))
        if data is None:
            raise FileNotFoundError(f"DFKV has no {_header_key(header)}, or does not answer")
        return data

    def write(self, header: KvBlockHeader, data: bytes) -> None:
        """Seal and store; does nothing where the part is there."""
        self._client.put(_header_key(header), seal(data))

    def remove_part(self, header: KvBlockHeader) -> None:
        self._client.remove([_header_key(header)])

    def note(self, prefix: KvPrefix) -> None:
        """Make a prefix findable by its name; lost where other realms have all its slots."""
        held = [self._prefix(prefix.names[-1], slot) for slot in range(NUM_SLOTS)]
        if any(other is not None and other.realm == prefix.realm for other in held) or None not in held:
            return
        key = _prefix_key(prefix.names[-1], held.index(None))
        self._client.remove([key])  # what is damaged would stay: a key is written once
        self._client.put(key, encode_prefix(prefix))

    def prefixes(self, name: str) -> list[KvPrefix]:
        """Prefixes of that name that were noted, by realm; their blocks may be gone."""
        found = (self._prefix(name, slot) for slot in range(NUM_SLOTS))
        return [prefix for prefix in found if prefix is not None]

    def remove(self, prefix: KvPrefix) -> None:
        """Remove its blocks and what was noted of it."""
        name, slots = prefix.names[-1], range(NUM_SLOTS)
        notes = [_prefix_key(name, slot) for slot in slots if (held := self._prefix(name, slot)) and held.realm == prefix.realm]
        ranks = range(prefix.num_ranks)
        self._client.remove([*(_block_key(prefix.realm, block, rank) for block in prefix.names for rank in ranks), *notes])

    def _prefix(self, name: str, slot: int) -> KvPrefix | None:
        data = self._client.get(_prefix_key(name, slot), _MAX_PREFIX_BYTES)
        try:
            return decode_prefix(data, name) if data is not None else None
        except FrameError:
            return None


def _header_key(header: KvBlockHeader) -> str:
    return _block_key(header.realm, header.name, header.rank)


def _block_key(realm: KvRealm, name: str, rank: int) -> str:
    return f"{realm.layout_hash}/{realm.target_version}/{realm.tenant}/{name}.{rank}"


def _prefix_key(name: str, slot: int) -> str:
    return f"prefix/{name}.{slot}"
