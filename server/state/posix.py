"""PosixState: the KV that engines keep on a path beyond their own life (`server/engine/kv_store_connector.py`).

Works on the files alone, so it needs no engine and no other process. Every engine that mounts the path can load from it.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from pathlib import Path

import msgspec

from server.state.store import StateHeld, StateLocation, StateNotFound, StateObject, TenantUsage
from wire.kv_block_format import KvBlockHeader, KvRealm
from wire.kv_files import Hold, KvDirectory


class PosixState:
    """A StateStore over one directory."""

    tier = "disk"
    reads_disk = True
    can_remove = True

    def __init__(self, directory: KvDirectory) -> None:
        self._directory = directory

    def locate(self, object_id: str) -> list[StateObject]:
        found = ((realm, self._directory.prefix(realm, object_id)) for realm in self._directory.realms())
        return [self._object(realm, prefix) for realm, prefix in found if prefix]

    def lease(self, state: StateObject, duration_s: float) -> StateObject:
        realm, hold = self._hold(state)
        lease_until_s = max(hold.lease_until_s, time.time() + duration_s)
        return self._keep(realm, state, msgspec.structs.replace(hold, lease_until_s=lease_until_s))

    def migrate(self, state: StateObject, node: str) -> StateObject:
        """Nothing moves: an engine with this directory and the object's layout and target version loads it when asked to go
        on from it, at the cost of reading its bytes. An engine without the directory cannot get at it."""
        return self._refresh(_realm(state), state.id)

    def pin(self, state: StateObject) -> StateObject:
        realm, hold = self._hold(state)
        return self._keep(realm, state, msgspec.structs.replace(hold, is_pinned=True))

    def unpin(self, state: StateObject) -> StateObject:
        realm, hold = self._hold(state)
        return self._keep(realm, state, msgspec.structs.replace(hold, is_pinned=False))

    def evict(self, state: StateObject) -> int:
        realm = _realm(state)
        current = self._refresh(realm, state.id)
        if current.pins or current.lease_until_s > time.time():
            until = "it is pinned" if current.pins else f"it is leased for {current.lease_until_s - time.time():.0f} s more"
            raise StateHeld(f"{state.id} of tenant {state.tenant} cannot be evicted: {until}; unpin it or wait")
        prefix = self._directory.prefix(realm, state.id)
        num_children = Counter(header.parent for header in self._directory.headers(realm))
        held = {name for held_realm, name in self._directory.held(time.time()) if held_realm == realm}
        num_bytes = 0
        for header in reversed(prefix):
            if num_children[header.name] or header.name in held:
                break
            for path in self._directory.parts(realm, header.name):
                num_bytes += _size_bytes(path)
                path.unlink(missing_ok=True)
            num_children[header.parent] -= 1
        return num_bytes

    def usage(self) -> list[TenantUsage]:
        num_bytes: dict[str, int] = defaultdict(int)
        names: dict[str, set[tuple[KvRealm, str]]] = defaultdict(set)
        for block in self._directory.blocks():
            num_bytes[block.realm.tenant] += block.num_bytes
            names[block.realm.tenant].add((block.realm, block.name))
        return [
            TenantUsage(tier=self.tier, tenant=tenant, num_blocks=len(names[tenant]), num_bytes=num_bytes[tenant])
            for tenant in sorted(names)
        ]

    def _hold(self, state: StateObject) -> tuple[KvRealm, Hold]:
        """What holds an object now, over the blocks it has now; raises StateNotFound."""
        realm = _realm(state)
        names = self._refresh(realm, state.id).block_hashes
        hold = self._directory.hold(realm, state.id) or Hold(names=names)
        return realm, msgspec.structs.replace(hold, names=names)

    def _keep(self, realm: KvRealm, state: StateObject, hold: Hold) -> StateObject:
        """Write the hold, then look again: an eviction that was under way may have been faster."""
        self._directory.set_hold(realm, state.id, hold)
        return self._refresh(realm, state.id)

    def _refresh(self, realm: KvRealm, object_id: str) -> StateObject:
        prefix = self._directory.prefix(realm, object_id)
        if not prefix:
            raise StateNotFound(
                f"{object_id} of tenant {realm.tenant} is not stored any more, or not as a whole; locate it again"
            )
        return self._object(realm, prefix)

    def _object(self, realm: KvRealm, prefix: list[KvBlockHeader]) -> StateObject:
        names = tuple(header.name for header in prefix)
        hold = self._directory.hold(realm, names[-1])
        num_bytes = sum(_size_bytes(path) for name in names for path in self._directory.parts(realm, name))
        location = StateLocation(tier=self.tier, node=str(self._directory.root), num_blocks=len(names), num_bytes=num_bytes)
        return StateObject(
            id=names[-1],
            tenant=realm.tenant,
            model=prefix[-1].model,
            target_version=realm.target_version,
            layout_hash=realm.layout_hash,
            block_hashes=names,
            locations=(location,),
            lease_until_s=hold.lease_until_s if hold is not None else 0.0,
            pins=int(hold is not None and hold.is_pinned),
        )


def _size_bytes(path: Path) -> int:
    """0 where it is gone: engines that share the directory remove files meanwhile."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _realm(state: StateObject) -> KvRealm:
    if state.tenant is None or state.target_version is None:
        raise StateNotFound(f"{state.id} is in an engine's cache, not in this store; locate it here")
    return KvRealm(state.layout_hash, state.target_version, state.tenant)
