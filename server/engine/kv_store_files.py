"""FileStore: blocks as files on a path, within a bound that all engines which share it keep."""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Iterator, Sequence

from server.engine.kv_store_counts import EVICTED, StoreCounts
from wire.kv_block_format import KvBlockHeader, KvRealm
from wire.kv_files import KvDirectory, read_block
from wire.kv_prefix import KvPrefix

RESERVED_BYTES = 1 << 30
"""Left free on the disk for drafts, checkpoints and logs, which share it."""
_SHRINK_TO = 0.9
"""Share of the bound that is left after an eviction: so it is rare."""
_RECOUNT_S = 30.0
"""Other engines write to the same directory."""


class FileStore:
    """A BlockStore over one directory."""

    def __init__(self, directory: KvDirectory, max_bytes: int, counts: StoreCounts) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._counts = counts
        self._num_stored_bytes = 0
        self._recount_at_s = 0.0

    def has(self, realm: KvRealm, names: Sequence[str], num_ranks: int) -> Iterator[bool]:
        return (self._directory.has_block(realm, name, num_ranks) for name in names)

    def has_part(self, header: KvBlockHeader) -> bool:
        return self._directory.part_path(header).exists()

    def read(self, header: KvBlockHeader, *, tensor_bytes: int) -> bytes:
        return read_block(self._directory.part_path(header), tensor_bytes=tensor_bytes)

    def discard(self, header: KvBlockHeader) -> None:
        try:
            self._directory.part_path(header).unlink()
        except OSError:
            return

    def make_room(self, num_bytes: int) -> bool:
        """Removes the least recently used blocks that nothing holds; raises OSError where the disk is nearly full."""
        self._directory.create()
        if shutil.disk_usage(self._directory.root).free < RESERVED_BYTES:
            raise OSError(errno.ENOSPC, f"less than {RESERVED_BYTES} bytes are free, which are left for the rest of the system")
        is_full = self._num_stored_bytes + num_bytes > self._max_bytes
        if is_full or time.monotonic() >= self._recount_at_s:
            limit = self._max_bytes - num_bytes
            self._num_stored_bytes, num_removed = self._directory.shrink(limit, leave_bytes=int(limit * _SHRINK_TO))
            self._recount_at_s = time.monotonic() + _RECOUNT_S
            self._counts.add(EVICTED, num_removed)
        return self._num_stored_bytes + num_bytes <= self._max_bytes

    def write(self, header: KvBlockHeader, data: bytes) -> None:
        self._directory.write(self._directory.part_path(header), data)
        self._num_stored_bytes += len(data)

    def note_use(self, prefix: KvPrefix, num_prompt_blocks: int, rank: int) -> None:
        """Its files become the youngest."""
        self._directory.touch([self._directory.block_path(prefix.realm, name, rank) for name in prefix.names])
