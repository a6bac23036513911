"""EngineState: the KV in the engines' own caches, as their KV events tell. It can be located, and nothing else.

An engine's cache is a cache: stock vLLM evicts by use and has no call to keep, drop or hand over one prefix. KV moves
between engines as a part of a request only (a remote prefill pulled over NIXL), which the router decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NoReturn, Protocol

from server.state.store import StateLocation, StateObject, StateUnsupported, TenantUsage
from wire.kv_blocks import BlockName


class PrefixHolders(Protocol):
    """What this back end asks of the KV index."""

    def holders(self, name: BlockName) -> dict[str, list[BlockName]]:
        """By engine that holds a block and everything before it: the names of that prefix, in order."""


class EngineFacts(Protocol):
    """What this back end asks of one engine."""

    @property
    def id(self) -> str: ...

    @property
    def model(self) -> str: ...

    @property
    def target_version(self) -> int | None: ...

    @property
    def block_bytes(self) -> int | None:
        """Bytes of one block over all ranks; None before the engine has told."""


class EngineState:
    """`engines` gives the engines as they are now."""

    tier = "device"

    def __init__(self, index: PrefixHolders, engines: Callable[[], Iterable[EngineFacts]]) -> None:
        self._index = index
        self._engines = engines

    def locate(self, object_id: str) -> list[StateObject]:
        held = self._index.holders(bytes.fromhex(object_id))
        by_version: dict[tuple[str, int | None], list[EngineFacts]] = {}
        for engine in self._engines():
            if engine.id in held:
                by_version.setdefault((engine.model, engine.target_version), []).append(engine)
        return [
            StateObject(
                id=object_id,
                tenant=None,
                model=model,
                target_version=version,
                layout_hash="",
                block_hashes=tuple(name.hex() for name in held[engines[0].id]),
                locations=tuple(_location(engine, len(held[engine.id])) for engine in engines),
            )
            for (model, version), engines in by_version.items()
        ]

    def lease(self, state: StateObject, duration_s: float) -> NoReturn:
        raise _unsupported("leased", "vLLM leases KV only between the two legs of a remote prefill")

    def migrate(self, state: StateObject, node: str) -> NoReturn:
        raise _unsupported(
            "moved", "KV leaves an engine only as a part of a request, pulled over NIXL when the router asks for it"
        )

    def pin(self, state: StateObject) -> NoReturn:
        raise _unsupported("pinned", "vLLM evicts by use")

    def unpin(self, state: StateObject) -> NoReturn:
        raise _unsupported("unpinned", "vLLM evicts by use")

    def evict(self, state: StateObject) -> NoReturn:
        raise _unsupported("evicted", "vLLM can only drop its whole prefix cache, which would cost every other prefix too")

    def usage(self) -> list[TenantUsage]:
        """Empty: KV events do not name tenants."""
        return []


def _location(engine: EngineFacts, num_blocks: int) -> StateLocation:
    num_bytes = num_blocks * engine.block_bytes if engine.block_bytes is not None else None
    return StateLocation(tier=EngineState.tier, node=engine.id, num_blocks=num_blocks, num_bytes=num_bytes)


def _unsupported(done: str, reason: str) -> StateUnsupported:
    return StateUnsupported(f"one prefix in an engine's cache cannot be {done}: {reason}; use a KV store for KV that must stay")
