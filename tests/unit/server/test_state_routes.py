"""What an operator can do with KV as state, over a real socket: what is stored is kept and removed, an engine's cache is not."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import dfkv_rig
import pytest
from block_files import REALM, file_bytes, header, names_of, store_prefix
from gateway_rig import GatewayRig, Reply, eventually, run, running

from server import disk
from server.config import KV_STORE_DIRECTORY, KvStoreSettings
from wire.kv_block_format import KvRealm
from wire.kv_blocks import prompt_chain
from wire.kv_dfkv import DfkvBlocks
from wire.kv_files import KvDirectory
from wire.kv_prefix import KvPrefix

OPERATIONS = ("pin", "unpin", "evict", "lease")
ENGINE_BLOCK_TOKENS = 16
PROMPT = list(range(ENGINE_BLOCK_TOKENS))


@asynccontextmanager
async def storing(state_dir: Path) -> AsyncIterator[tuple[GatewayRig, KvDirectory]]:
    """A gateway with a KV store."""
    async with running(state_dir, num_engines=2, kv_store=KvStoreSettings(enabled=True)) as rig:
        yield rig, KvDirectory(state_dir / KV_STORE_DIRECTORY)


async def post(rig: GatewayRig, operation: str, prompt_hash: str, **fields: Any) -> Reply:
    if operation == "lease":
        fields.setdefault("duration_s", 60.0)
    return await rig.admin("POST", f"/admin/state/{operation}", json={"prompt_hash": prompt_hash, **fields})


async def located(rig: GatewayRig, prompt_hash: str) -> list[Any]:
    reply = await rig.admin("GET", f"/admin/state?prompt_hash={prompt_hash}")
    return list(reply.json["objects"])


def hold_in_engine(rig: GatewayRig, engine_id: str) -> str:
    """As if the engine had told so."""
    rig.gateway.kv_index.store(engine_id, [1], None, PROMPT, ENGINE_BLOCK_TOKENS, [None])
    return prompt_chain(PROMPT, ENGINE_BLOCK_TOKENS, None)[-1].hex()


def test_a_pinned_prefix_cannot_be_evicted_until_it_is_unpinned(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with storing(tmp_path) as (rig, directory):
            names = names_of(2)
            store_prefix(directory, names)
            pinned = await post(rig, "pin", names[-1])
            assert (pinned.status, pinned.json["id"], pinned.json["pins"]) == (200, names[-1], 1)
            assert [one["pins"] for one in await located(rig, names[-1])] == [1]
            refused = await post(rig, "evict", names[-1])
            assert (refused.status, refused.code) == (409, "state_held")
            assert "unpin it" in refused.json["error"]["message"]
            assert (await post(rig, "unpin", names[-1])).json["pins"] == 0
            num_bytes = (await located(rig, names[-1]))[0]["locations"][0]["num_bytes"]
            evicted = await post(rig, "evict", names[-1])
            assert (evicted.status, evicted.json["freed_bytes"], evicted.json["evicted"]["id"]) == (200, num_bytes, names[-1])
            assert await located(rig, names[-1]) == []
            assert list(directory.blocks()) == []
            again = await post(rig, "evict", names[-1])
            assert (again.status, again.code) == (404, "state_not_found")

    run(scenario())


def test_a_lease_keeps_a_prefix_for_its_time_and_never_shortens(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with storing(tmp_path) as (rig, directory):
            names = names_of(1)
            store_prefix(directory, names)
            until_s = (await post(rig, "lease", names[0], duration_s=60.0)).json["lease_until_s"]
            assert until_s == pytest.approx(time.time() + 60.0, abs=30.0)
            assert (await post(rig, "lease", names[0], duration_s=1.0)).json["lease_until_s"] == until_s
            assert (await post(rig, "evict", names[0])).code == "state_held"
            for duration_s in (0, -1, 1e9, "long", None):
                assert (await post(rig, "lease", names[0], duration_s=duration_s)).code == "bad_body"

    run(scenario())


def test_one_of_several_objects_of_a_prefix_has_to_be_named(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with storing(tmp_path) as (rig, directory):
            names = names_of(1)
            for tenant, version in (("alpha", 0), ("beta", 0), ("beta", 1)):
                store_prefix(directory, names, realm=REALM._replace(tenant=tenant, target_version=version))
            for fields in ({}, {"tenant": "beta"}, {"model": "tiny"}, {"layout_hash": REALM.layout_hash}):
                refused = await post(rig, "pin", names[0], **fields)
                assert (refused.status, refused.code) == (409, "state_ambiguous")
                assert "tenant beta, model tiny, target_version 1" in refused.json["error"]["message"]
            assert (await post(rig, "evict", names[0], tenant="alpha")).status == 200
            assert (await post(rig, "pin", names[0], tenant="beta", target_version=1)).status == 200
            assert {(one["tenant"], one["target_version"]): one["pins"] for one in await located(rig, names[0])} == {
                ("beta", 0): 0,
                ("beta", 1): 1,
            }
            for fields in ({"tenant": "gamma"}, {"model": "other"}, {"layout_hash": "0" * 16}, {"target_version": 2}):
                assert (await post(rig, "pin", names[0], **fields)).code == "state_not_found"

    run(scenario())


@pytest.mark.parametrize(
    ("operation", "advice"),
    [("pin", "kv_store"), ("unpin", "no pin"), ("evict", "restart of the engine"), ("lease", "kv_store")],
)
def test_what_an_engines_cache_cannot_do_is_refused_with_the_reason(tmp_path: Path, operation: str, advice: str) -> None:
    async def scenario() -> None:
        async with running(tmp_path, num_engines=2) as rig:
            name = hold_in_engine(rig, "engine-0")
            assert len(await located(rig, name)) == 1
            for fields in ({}, {"tenant": "default"}):
                refused = await post(rig, operation, name, **fields)
                assert (refused.status, refused.code) == (501, "state_unsupported")
                assert advice in refused.json["error"]["message"]
            assert len(await located(rig, name)) == 1

    run(scenario())


def test_a_dead_engine_is_nowhere_to_look_for_kv(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, num_engines=2) as rig:
            name = hold_in_engine(rig, "engine-0")
            await rig.engine.stop()
            await eventually(lambda: not rig.gateway.fleet.engines[0].ready)
            assert await located(rig, name) == []

    run(scenario())


def test_a_prefix_in_an_engine_and_in_the_store_is_kept_in_the_store(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with storing(tmp_path) as (rig, directory):
            name = hold_in_engine(rig, "engine-1")
            store_prefix(directory, [name])
            assert [one["locations"][0]["tier"] for one in await located(rig, name)] == ["device", "disk"]
            assert (await post(rig, "pin", name)).json["locations"][0]["tier"] == "disk"

    run(scenario())


def test_a_prefix_in_an_engine_and_in_dfkv_is_removed_from_dfkv(tmp_path: Path) -> None:
    async def scenario(dfkv: dfkv_rig.Dfkv) -> None:
        store = KvStoreSettings(enabled=True, dfkv=dfkv.settings)
        async with running(tmp_path, num_engines=2, kv_store=store) as rig:
            name, blocks = hold_in_engine(rig, "engine-1"), DfkvBlocks(dfkv.client())
            part = header([name], 0)
            blocks.write(part, file_bytes(part))
            blocks.note(KvPrefix(model="tiny", **REALM._asdict(), names=(name,), num_ranks=1, part_bytes=64))
            assert [one["locations"][0]["tier"] for one in await located(rig, name)] == ["device", "dfkv"]
            pinned = await post(rig, "pin", name)
            assert (pinned.status, pinned.code) == (501, "state_unsupported")
            assert "DFKV" in pinned.json["error"]["message"]
            assert (await post(rig, "evict", name)).json["freed_bytes"] == 64
            assert [one["locations"][0]["tier"] for one in await located(rig, name)] == ["device"]

    with dfkv_rig.running("stand-in", tmp_path) as dfkv:
        run(scenario(dfkv))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_names_no_prefix_is_refused(tmp_path: Path, operation: str) -> None:
    async def scenario() -> None:
        async with storing(tmp_path) as (rig, _):
            assert (await post(rig, operation, "../../etc")).code == "bad_prompt_hash"
            assert (await post(rig, operation, "0" * 32)).code == "state_not_found"
            for fields in ({"path": "/"}, {"tenant": 1}, {"target_version": "0"}):
                assert (await post(rig, operation, "0" * 32, **fields)).code == "bad_body"
            assert (await rig.admin("POST", f"/admin/state/{operation}")).code == "bad_body"
            assert (await rig.admin("GET", f"/admin/state/{operation}")).status == 405
            foreign = await rig.admin("POST", f"/admin/state/{operation}", token="engine-token")
            assert (foreign.status, foreign.code) == (401, "unauthorized")

    run(scenario())


def test_a_disk_that_refuses_is_said_and_nothing_is_pinned(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with storing(tmp_path) as (rig, directory):
            names = names_of(1)
            (path,) = store_prefix(directory, names)
            holds = path.parent / "holds"
            holds.write_text("not a directory")
            refused = await post(rig, "pin", names[0])
            assert (refused.status, refused.code) == (503, "state_unavailable")
            holds.unlink()
            assert [one["pins"] for one in await located(rig, names[0])] == [0]

    run(scenario())


def test_a_disk_that_does_not_answer_is_said_and_holds_nobody_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "DEADLINE_S", 0.2)

    async def scenario() -> None:
        async with storing(tmp_path) as (rig, directory):
            names = names_of(1)
            store_prefix(directory, names)
            realms, answers = KvDirectory.realms, threading.Event()

            def slow(self: KvDirectory) -> list[KvRealm]:
                answers.wait()
                return realms(self)

            monkeypatch.setattr(KvDirectory, "realms", slow)
            try:
                async with asyncio.timeout(10.0):
                    for reply in (
                        await rig.admin("GET", f"/admin/state?prompt_hash={names[0]}"),
                        await post(rig, "pin", names[0]),
                    ):
                        assert (reply.status, reply.code, reply.headers["Retry-After"]) == (503, "disk_stuck", "1")
            finally:
                answers.set()
            assert (await post(rig, "pin", names[0])).json["pins"] == 1

    run(scenario())
