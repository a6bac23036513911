"""KV in the engines' caches as state: located as the events tell, everything else refused with its reason."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from block_files import names_of

from server.state.engines import EngineState
from server.state.store import StateUnsupported
from wire.kv_blocks import BlockName


class Facts(NamedTuple):
    id: str
    target_version: int | None = 0
    block_bytes: int | None = 1000
    model: str = "tiny"


class Held:
    """Prefixes by engine."""

    def __init__(self, **names: list[str]) -> None:
        self._names = {engine_id.replace("_", "-"): [bytes.fromhex(name) for name in held] for engine_id, held in names.items()}

    def holders(self, name: BlockName) -> dict[str, list[BlockName]]:
        return {engine_id: held[: held.index(name) + 1] for engine_id, held in self._names.items() if name in held}


def test_engines_that_hold_a_prefix_are_its_locations() -> None:
    names = names_of(3)
    state = EngineState(Held(a=names, b=names[:2], c=[]), lambda: [Facts("a"), Facts("b", block_bytes=None), Facts("c")])
    (both,) = state.locate(names[1])
    assert both.block_hashes == tuple(names[:2])
    assert [(location.node, location.num_bytes) for location in both.locations] == [("a", 2000), ("b", None)]
    (one,) = state.locate(names[2])
    assert [location.node for location in one.locations] == ["a"]
    assert state.locate(names_of(1, first_token=7)[0]) == []


def test_kv_of_different_target_versions_is_not_one_object() -> None:
    names = names_of(1)
    state = EngineState(Held(a=names, b=names), lambda: [Facts("a", target_version=0), Facts("b", target_version=1)])
    assert sorted(found.target_version or 0 for found in state.locate(names[0])) == [0, 1]


def test_what_an_engine_cannot_do_is_refused_with_the_reason() -> None:
    names = names_of(1)
    state = EngineState(Held(a=names), lambda: [Facts("a")])
    (found,) = state.locate(names[0])
    for operation, reason in (
        (state.pin, "evicts by use"),
        (state.unpin, "evicts by use"),
        (state.evict, "whole prefix cache"),
        (lambda one: state.lease(one, 1.0), "two legs of a remote prefill"),
        (lambda one: state.migrate(one, "b"), "pulled over NIXL"),
    ):
        with pytest.raises(StateUnsupported, match=reason):
            operation(found)
    assert state.usage() == []
