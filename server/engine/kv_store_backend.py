"""BlockStore: where the blocks outlive an engine. The rest of the KV store knows nothing else of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from server.engine.kv_store_counts import StoreCounts
from server.engine.kv_store_dfkv import DfkvStore
from server.engine.kv_store_files import FileStore
from wire.dfkv import DfkvClient, DfkvSettings
from wire.errors import ConfigError
from wire.kv_block_format import KvBlockHeader, KvRealm
from wire.kv_dfkv import DfkvBlocks
from wire.kv_files import KvDirectory
from wire.kv_prefix import KvPrefix

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig


class BlockStore(Protocol):
    """One store. The scheduler calls `has` between steps; a worker's reader and its writer call the rest in threads of theirs.

    Where it refuses, methods raise OSError.
    """

    def has(self, realm: KvRealm, names: Sequence[str], num_ranks: int) -> Iterator[bool]:
        """By name, whether all ranks' parts seem to be there. Lazy: what nobody asks for costs nothing. Raises nothing."""

    def has_part(self, header: KvBlockHeader) -> bool:
        """Whether that rank's part of that block is there."""

    def read(self, header: KvBlockHeader, *, tensor_bytes: int) -> bytes:
        """What is stored as that part, unchecked, of at most that many bytes of tensors; raises OSError or WireError."""

    def discard(self, header: KvBlockHeader) -> None:
        """Remove a part that is worth nothing, as far as that can be done now."""

    def make_room(self, num_bytes: int) -> bool:
        """Whether that much more may be written, after whatever had to go for it."""

    def write(self, header: KvBlockHeader, data: bytes) -> None:
        """Seal and store a part; a reader sees all of it or nothing."""

    def note_use(self, prefix: KvPrefix, num_prompt_blocks: int, rank: int) -> None:
        """A request has ended that was computed with that prefix, so many blocks of which are of its prompt alone."""


def open_store(transfer: KVTransferConfig, counts: StoreCounts) -> BlockStore:
    """As `store_connector` of `launch/engine_command.py` wants it; raises ConfigError."""
    dfkv = transfer.get_from_extra_config("dfkv", None)
    if isinstance(dfkv, dict):
        settings = DfkvSettings.build(dfkv, source="the KV store's `dfkv`")
        return DfkvStore(DfkvBlocks(DfkvClient(settings)), counts)
    root = transfer.get_from_extra_config("directory", None)
    max_bytes = transfer.get_from_extra_config("max_bytes", None)
    if not isinstance(root, str) or not isinstance(max_bytes, int) or max_bytes <= 0:
        raise ConfigError(
            f"the KV store needs `dfkv`, or a `directory` and `max_bytes` above 0, got {root!r} and {max_bytes!r}"
        )
    return FileStore(KvDirectory(Path(root)), max_bytes, counts)
