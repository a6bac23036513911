"""EngineState: the KV in the engines' own caches, as their KV events tell. It can be located, and nothing else.

An engine's cache is a cache: stock vLLM evicts by use and has no call to keep, drop or hand over one prefix. KV moves
between engines as a part of a request only (a remote prefill pulled over NIXL), which the router decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, NoReturn, Protocol

from server.fleet import Fleet
from server.state.store import StateLocation, StateObject, StateUnsupported, TenantUsage
from wire.kv_blocks import BlockName

_TO_KEEP = "KV that must stay belongs into the KV store of combined engines ([kv_store] enabled = true)"


class PrefixHolders(Protocol):
    """What this back end asks of the KV index."""

    def holders(self, name: BlockName) -> dict[str, list[BlockName]]:
        """By engine that holds a block and everything before it: the names of that prefix, in order."""


class EngineFacts(NamedTuple):
    """What this back end knows of one engine besides what it holds."""

    id: str
    model: str
    target_version: int | None
    block_bytes: int
    """Of one block, over all ranks and layers."""


def engine_facts(fleet: Fleet) -> list[EngineFacts]:
    """Of the engines that answer: of one that died the index remembers blocks until it is back as another process."""
    return [
        EngineFacts(
            id=engine.id,
            model=engine.status.spec.target_id,
            target_version=engine.target_version,
            block_bytes=engine.status.kv.block_size_tokens * engine.status.kv.bytes_per_token,
        )
        for engine in fleet.engines
        if engine.ready and engine.status is not None
    ]


class EngineState:
    """`engines` gives the engines as they are now: `partial(engine_facts, fleet)`."""

    tier = "device"
    reads_disk = False
    can_remove = False

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
        raise _unsupported("leased", f"vLLM leases KV only between the two legs of a remote prefill; {_TO_KEEP}")

    def migrate(self, state: StateObject, node: str) -> NoReturn:
        raise _unsupported(
            "moved", "KV leaves an engine only as a part of a request, pulled over NIXL when the router asks for it"
        )

    def pin(self, state: StateObject) -> NoReturn:
        raise _unsupported("pinned", f"vLLM evicts by use; {_TO_KEEP}")

    def unpin(self, state: StateObject) -> NoReturn:
        raise _unsupported("unpinned", "vLLM evicts by use, so there is no pin on it")

    def evict(self, state: StateObject) -> NoReturn:
        raise _unsupported(
            "evicted",
            "vLLM can only drop its whole prefix cache, which would cost every other prefix too; it goes when others need the "
            "room, or all of it with a restart of the engine",
        )

    def usage(self) -> list[TenantUsage]:
        """Empty: KV events do not name tenants."""
        return []


def _location(engine: EngineFacts, num_blocks: int) -> StateLocation:
    num_bytes = num_blocks * engine.block_bytes
    return StateLocation(tier=EngineState.tier, node=engine.id, num_blocks=num_blocks, num_bytes=num_bytes)


def _unsupported(done: str, reason: str) -> StateUnsupported:
    return StateUnsupported(f"one prefix in an engine's cache cannot be {done}: {reason}")
