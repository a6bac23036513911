"""Draining: an engine gets nothing new, ends what it has, and is drained when nobody can want anything of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from fake_engine import FakeEngine
from gateway_rig import GatewayRig, eventually, run, running

from server.config import KV_LEASE_S


async def _drain(rig: GatewayRig, engine_id: str, verb: str = "drain") -> Any:
    reply = await rig.admin("POST", f"/admin/engines/{engine_id}/{verb}")
    assert reply.status == 200
    return reply.json


def test_draining_engine_gets_nothing_new_and_ends_what_it_has(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, num_engines=2) as rig:
            first, second = rig.engines
            first.chunk_gate = gate = asyncio.Event()
            running_one = asyncio.create_task(rig.complete(stream=True))
            await eventually(lambda: first.num_running == 1)
            view = await _drain(rig, "engine-0")
            assert view == {
                "id": "engine-0",
                "is_draining": True,
                "is_drained": False,
                "num_in_flight": 1,
                "lease_left_s": 0.0,
            }
            for _ in range(4):
                assert (await rig.complete()).status == 200
            assert (len(first.bodies), len(second.bodies)) == (1, 4)
            assert [engine["is_draining"] for engine in (await rig.status())["engines"]] == [True, False]
            gate.set()
            assert b"[DONE]" in (await running_one).body
            assert (await _drain(rig, "engine-0"))["is_drained"] is True
            assert (await _drain(rig, "engine-0", "undrain"))["is_draining"] is False
            first.chunk_gate = None
            await rig.complete()
            assert len(first.bodies) == 2

    run(scenario())


def test_without_another_engine_clients_are_told_to_come_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            await _drain(rig, "engine-0")
            reply = await rig.complete()
            assert (reply.status, reply.code, reply.headers["Retry-After"]) == (503, "no_engine_ready", "10")
            assert "engine-0: is draining" in reply.json["error"]["message"]
            assert (await rig.request("GET", "/ready")).status == 503

    run(scenario())


def test_clients_are_told_in_words_why_no_engine_of_the_pools_answers(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, kinds=("prefill", "decode")) as rig:
            await _drain(rig, "engine-1")
            refused = (await rig.complete()).json["error"]["message"]
            assert "engine-0: a prefill engine answers no client itself; engine-1: is draining" in refused
            await rig.engines[1].stop()
            await eventually(lambda: not rig.gateway.fleet.engines[1].ready)
            for reply in (await rig.complete(), await rig.request("GET", "/ready")):
                assert reply.json["error"]["message"].endswith("engine-1: does not accept connections; it may be starting")
                assert (reply.status, reply.headers["Retry-After"]) == (503, "10")

    run(scenario())


def test_prefill_engine_is_drained_only_when_its_leases_are_over(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, kinds=("prefill", "decode")) as rig:
            engine = rig.gateway.fleet.engines[0]
            view = await _drain(rig, "engine-0")
            assert view["is_drained"] is False, "a gateway that was here before may have left leases"
            assert 0 < view["lease_left_s"] <= KV_LEASE_S
            engine.last_lease_s = asyncio.get_running_loop().time() - KV_LEASE_S / 2
            view = await _drain(rig, "engine-0")
            assert view["is_drained"] is False
            assert 0 < view["lease_left_s"] <= KV_LEASE_S / 2
            engine.last_lease_s -= KV_LEASE_S
            assert (await _drain(rig, "engine-0"))["is_drained"] is True

    run(scenario())


def test_engine_that_drains_takes_requests_only_once_it_was_started_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            engine = rig.gateway.fleet.engines[0]
            await _drain(rig, "engine-0")
            await rig.engine.stop()
            await eventually(lambda: not engine.ready)
            await rig.engine.start()
            await eventually(lambda: engine.ready)
            assert (await rig.complete()).status == 503, "it is the same process"
            epoch = engine.epoch
            await rig.engine.restart(draft_version=0)
            await eventually(lambda: engine.ready and engine.epoch != epoch)
            assert (await rig.complete()).status == 200

    run(scenario())


def test_engine_drained_before_the_gateway_has_met_it_stays_drained(tmp_path: Path) -> None:
    async def scenario() -> None:
        def hang(engines: list[FakeEngine]) -> None:
            engines[0].core_gate = asyncio.Event()

        async with running(tmp_path, before=hang, wait_ready=False) as rig:
            engine = rig.gateway.fleet.engines[0]
            await eventually(lambda: "status" in rig.engine.calls)
            assert not engine.epoch
            assert (await _drain(rig, "engine-0"))["is_draining"] is True
            assert rig.engine.core_gate is not None
            rig.engine.core_gate.set()
            await eventually(lambda: engine.ready)
            assert not engine.takes_requests

    run(scenario())


def test_unknown_engine_is_named_with_the_known_ones(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, num_engines=2) as rig:
            for verb in ("drain", "undrain"):
                reply = await rig.admin("POST", f"/admin/engines/nobody/{verb}")
                assert (reply.status, reply.code) == (404, "engine_not_found")
                assert "engine-0" in reply.json["error"]["message"]
            assert (await rig.admin("POST", "/admin/engines/engine-0/drain", token="wrong")).status == 401

    run(scenario())


def test_engines_restarted_one_by_one_under_load_fail_no_request(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, num_engines=2) as rig:
            stop = asyncio.Event()
            replies = []

            async def client() -> None:
                while not stop.is_set():
                    replies.append(await rig.complete(stream=len(replies) % 2 == 0))

            clients = [asyncio.create_task(client()) for _ in range(6)]
            for index, engine in enumerate(rig.engines):
                fleet_engine = rig.gateway.fleet.engines[index]
                epoch = fleet_engine.epoch
                while not (await _drain(rig, engine.id))["is_drained"]:
                    await asyncio.sleep(0.01)
                await engine.stop()
                await eventually(lambda: not fleet_engine.ready)  # noqa: B023
                await engine.restart(draft_version=0)
                await eventually(lambda: fleet_engine.ready and fleet_engine.epoch != epoch)  # noqa: B023
                assert fleet_engine.takes_requests
                num_replies = len(replies)
                await eventually(lambda: len(replies) > num_replies + 10)  # noqa: B023
            stop.set()
            await asyncio.gather(*clients)
            assert {reply.status for reply in replies} == {200}
            assert all(b"error" not in reply.body for reply in replies)

    run(scenario())
