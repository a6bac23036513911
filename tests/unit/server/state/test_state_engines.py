"""KV in the engines' caches as state: located as the events tell, everything else refused with its reason."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest
from block_files import names_of
from fake_engine import FakeEngine
from gateway_rig import SPEC

from server.config import EngineEndpoint
from server.engines import EngineClient
from server.fleet import Engine, Fleet
from server.state.engines import EngineFacts, EngineState, engine_facts
from server.state.store import StateUnsupported
from wire.kv_blocks import BlockName


def facts(engine_id: str, target_version: int = 0) -> EngineFacts:
    return EngineFacts(id=engine_id, model="tiny", target_version=target_version, block_bytes=1000)


class Held:
    """Prefixes by engine."""

    def __init__(self, **names: list[str]) -> None:
        self._names = {engine_id.replace("_", "-"): [bytes.fromhex(name) for name in held] for engine_id, held in names.items()}

    def holders(self, name: BlockName) -> dict[str, list[BlockName]]:
        return {engine_id: held[: held.index(name) + 1] for engine_id, held in self._names.items() if name in held}


def test_engines_that_hold_a_prefix_are_its_locations() -> None:
    names = names_of(3)
    state = EngineState(Held(a=names, b=names[:2], c=[]), lambda: [facts("a"), facts("b"), facts("c")])
    (both,) = state.locate(names[1])
    assert both.block_hashes == tuple(names[:2])
    assert [(location.node, location.num_bytes) for location in both.locations] == [("a", 2000), ("b", 2000)]
    (one,) = state.locate(names[2])
    assert [location.node for location in one.locations] == ["a"]
    assert state.locate(names_of(1, first_token=7)[0]) == []


def test_what_is_known_of_an_engine_is_what_it_told_and_only_while_it_answers(tmp_path: Path) -> None:
    async def facts_of_one_that_answers() -> list[EngineFacts]:
        fake = FakeEngine("told", SPEC, tmp_path, draft_version=0)
        async with aiohttp.ClientSession() as session:
            endpoints = [
                EngineEndpoint(id=engine_id, url="http://127.0.0.1:9", events_endpoint="")
                for engine_id in ("told", "silent", "dead")
            ]
            engines = [Engine(EngineClient(endpoint, session), endpoint.events_endpoint) for endpoint in endpoints]
            for engine in (engines[0], engines[2]):
                engine.adopt(fake.status())
                engine.mark_ready()
            engines[2].mark_down("died")
            await fake.close()
            return engine_facts(Fleet(engines))

    assert asyncio.run(facts_of_one_that_answers()) == [EngineFacts("told", "tiny", 0, 16 * 1024)]


def test_kv_of_different_target_versions_is_not_one_object() -> None:
    names = names_of(1)
    state = EngineState(Held(a=names, b=names), lambda: [facts("a", 0), facts("b", 1)])
    assert sorted(found.target_version or 0 for found in state.locate(names[0])) == [0, 1]


def test_what_an_engine_cannot_do_is_refused_with_the_reason() -> None:
    names = names_of(1)
    state = EngineState(Held(a=names), lambda: [facts("a")])
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
