"""DfkvState: the KV that engines keep in DFKV beyond their own life. It can be located and removed, and nothing else.

DFKV's interface can put, get, look for and remove one key. It cannot list keys, keep one from eviction, move or count them.
What can be located are the prompts of requests that have ended and these with their answers, because engines note them.
"""

from __future__ import annotations

from typing import NoReturn

from server.state.store import StateLocation, StateNotFound, StateObject, StateUnsupported, TenantUsage
from wire.dfkv import DfkvClient, DfkvServers
from wire.kv_dfkv import DfkvBlocks
from wire.kv_prefix import KvPrefix

_TO_KEEP = "KV that must stay belongs into files (a [kv_store] without [kv_store.dfkv])"


class DfkvState:
    """A StateStore over DFKV. A server that does not answer is an OSError, never an answer without what it holds."""

    tier = "dfkv"
    reads_disk = True
    can_remove = True

    def __init__(self, client: DfkvClient, servers: DfkvServers) -> None:
        self._blocks = DfkvBlocks(client)
        self._members = client.members
        self._servers = servers

    def locate(self, object_id: str) -> list[StateObject]:
        return [self._object(prefix) for prefix in self._whole(object_id)]

    def lease(self, state: StateObject, duration_s: float) -> NoReturn:
        raise _unsupported("leased", f"its servers evict by use alone; {_TO_KEEP}")

    def migrate(self, state: StateObject, node: str) -> NoReturn:
        raise _unsupported("moved", "its keys decide on which server they are; engines load from there what they are asked for")

    def pin(self, state: StateObject) -> NoReturn:
        raise _unsupported("pinned", f"its servers evict by use alone; {_TO_KEEP}")

    def unpin(self, state: StateObject) -> NoReturn:
        raise _unsupported("unpinned", "its servers evict by use alone, so there is no pin on it")

    def evict(self, state: StateObject) -> int:
        """Remove all its blocks: DFKV cannot tell which of them a longer prefix shares, so that one is computed anew."""
        for prefix in self._whole(state.id):
            if (prefix.layout_hash, prefix.target_version, prefix.tenant) == (
                state.layout_hash,
                state.target_version,
                state.tenant,
            ):
                self._blocks.remove(prefix)
                return prefix.num_bytes
        raise StateNotFound(f"{state.id} of tenant {state.tenant} is not in DFKV any more, or not as a whole; locate it again")

    def usage(self) -> list[TenantUsage]:
        raise StateUnsupported("what tenants keep in DFKV cannot be told: it neither lists nor counts what it holds")

    def _whole(self, name: str) -> list[KvPrefix]:
        """Prefixes of that name all of whose blocks are there now; raises ConnectionError."""
        silent = self._servers.silent()
        if silent:
            raise ConnectionError(f"DFKV does not answer at {', '.join(silent)}")
        return [one for one in self._blocks.prefixes(name) if all(self._blocks.has(one.realm, one.names, one.num_ranks))]

    def _object(self, prefix: KvPrefix) -> StateObject:
        location = StateLocation(tier=self.tier, node=self._members, num_blocks=len(prefix.names), num_bytes=prefix.num_bytes)
        return StateObject(
            id=prefix.names[-1],
            tenant=prefix.tenant,
            model=prefix.model,
            target_version=prefix.target_version,
            layout_hash=prefix.layout_hash,
            block_hashes=prefix.names,
            locations=(location,),
        )


def _unsupported(done: str, reason: str) -> StateUnsupported:
    return StateUnsupported(f"one prefix in DFKV cannot be {done}: {reason}")
