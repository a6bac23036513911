"""KV as state: where the KV of a prefix is, who needs it, and what may be done with it.

A state object is the KV of one prefix in one place's terms: one tenant, one layout of blocks, one target version. It can
have several locations. What a back end cannot do it refuses with the reason; nothing here pretends.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from wire.errors import PacelineError


class StateError(PacelineError):
    """The operation was not done; nothing changed."""

    code = "state_refused"


class StateNotFound(StateError):
    """No back end has that object, or it is gone by now."""

    code = "state_not_found"


class StateUnsupported(StateError):
    """This back end cannot do that at all, whatever the object."""

    code = "state_unsupported"


class StateHeld(StateError):
    """The object is pinned or leased."""

    code = "state_held"


class StateLocation(msgspec.Struct, frozen=True, kw_only=True):
    """One copy of an object, whole or in part."""

    tier: str
    """`device`: in an engine's cache, gone with the engine. `disk`: on a path, until evicted. `dfkv`: on servers, until unused."""
    node: str
    """An engine's id, the directory, or the servers."""
    num_blocks: int
    """Blocks from the start of the prefix that are there."""
    num_bytes: int
    """Of those blocks."""


class StateObject(msgspec.Struct, frozen=True, kw_only=True):
    """KV of one prefix."""

    kind: str = "kv"
    id: str
    """Hash of the prefix, hex: the name of its last whole block (`wire/kv_blocks.py`). Tokens and cache salt are in it."""
    tenant: str | None
    """Whose it is; None where the back end cannot tell, as an engine's cache keeps tenants apart by salt only."""
    model: str
    target_version: int | None
    layout_hash: str
    """Equal for blocks that can stand in for one another; empty where every location is one engine's own."""
    block_hashes: tuple[str, ...]
    """Names of its blocks in order, the last one its id; of an engine's only those that are known."""
    locations: tuple[StateLocation, ...]
    lease_until_s: float = 0.0
    """Unix time; 0 without a lease."""
    pins: int = 0
    """Pins in force; any keeps it for good."""


class TenantUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What one tenant's KV takes in one back end."""

    tier: str
    tenant: str
    num_blocks: int
    num_bytes: int


class StateStore(Protocol):
    """One back end. Where it reads a disk or asks a server, call its methods off the event loop; else on it, where what it reads changes.

    All operations but `locate` and `usage` take an object as `locate` gave it, and raise StateNotFound where it is gone,
    StateUnsupported where the back end has no such operation, OSError where a disk or a server refuses.
    """

    tier: str
    reads_disk: bool
    can_remove: bool
    """Whether it can remove one object, and perhaps keep it. Where not, all operations but `locate` and `usage` say why not."""

    def locate(self, object_id: str) -> list[StateObject]:
        """Every object of that prefix: one per tenant, layout and target version. A snapshot, true when it was taken.

        Only a whole prefix is an object: one whose first blocks are gone is not found. Asking does not count as use.
        """

    def lease(self, state: StateObject, duration_s: float) -> StateObject:
        """Keep it for at least that long from now: neither the bound of the store nor `evict` removes it meanwhile.

        A lease never shortens an earlier one, ends by itself, and survives a restart of everything. It does not protect
        from loss of the disk, nor from an update of the target, after which nothing reads KV of the old version.
        """

    def migrate(self, state: StateObject, node: str) -> StateObject:
        """Make it usable on that engine; returns it with its locations then.

        Costs its bytes over the path between, and nothing where both ends mount the same store.
        """

    def pin(self, state: StateObject) -> StateObject:
        """Keep it until `unpin`. Pins count towards the bound of the store: what is pinned leaves less for all others."""

    def unpin(self, state: StateObject) -> StateObject:
        """Take the pin back; one without a pin stays as it is. A lease is not touched."""

    def evict(self, state: StateObject) -> int:
        """Remove the blocks only this object needs, and return how many bytes that freed.

        Raises StateHeld where it is pinned or leased. Blocks shared with a longer or a held prefix stay,
        where the back end can tell.
        """

    def usage(self) -> list[TenantUsage]:
        """By tenant, in order of their names; raises StateUnsupported where the back end cannot tell."""
