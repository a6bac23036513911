"""Readiness: which engines may serve, and how one that comes back is brought into line."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from fake_engine import FakeEngine
from gateway_rig import SPEC, GatewayRig, eventually, publish, run, running

from wire.spec import SCHEMA_VERSION
from wire.store import DraftStore


async def _feeds_have_begun(rig: GatewayRig) -> None:
    """Each empties its index first and asks for what it missed, in vain here."""
    outcomes = [f'paceline_kv_replays_total{{engine="{engine.id}",outcome="unanswered"}}' for engine in rig.engines]

    async def have_asked() -> bool:
        return all([await rig.metric(outcome) for outcome in outcomes])

    await eventually(have_asked)


def _no_capture(engine: FakeEngine) -> None:
    engine.parts = ["weights"]


def _other_schema(engine: FakeEngine) -> None:
    engine.schema_version = 99


def _other_name(engine: FakeEngine) -> None:
    engine.status_id = "somebody"


@pytest.mark.parametrize(("spoil", "word"), [(_no_capture, "capture"), (_other_schema, "schema 99"), (_other_name, "somebody")])
def test_gateway_is_not_ready_until_the_parts_are_verified(tmp_path: Path, spoil, word: str) -> None:  # type: ignore[no-untyped-def]
    async def scenario() -> None:
        async with running(tmp_path, wait_ready=False, before=lambda engines: spoil(engines[0])) as rig:
            await eventually(lambda: "status" in rig.engine.calls)
            await eventually(lambda: word in rig.gateway.fleet.engines[0].reason)
            reply = await rig.request("GET", "/ready")
            assert (reply.status, reply.code) == (503, "not_ready")
            assert word in reply.json["error"]["message"]
            assert (await rig.complete()).status == 503
            assert (await rig.request("GET", "/health")).status == 200
            assert not rig.engine.bodies
            rig.engine.parts, rig.engine.schema_version, rig.engine.status_id = (
                ["capture", "weights", "mend:x"],
                SCHEMA_VERSION,
                rig.engine.id,
            )
            await eventually(lambda: rig.gateway.fleet.engines[0].ready)
            assert (await rig.request("GET", "/ready")).status == 200

    run(scenario())


def test_engine_with_another_spec_does_not_join(tmp_path: Path) -> None:
    async def scenario() -> None:
        def spoil(engines: list[FakeEngine]) -> None:
            engines[1].spec = msgspec.structs.replace(SPEC, hidden_size=16)

        async with running(tmp_path, num_engines=2, wait_ready=False, before=spoil) as rig:
            fleet = rig.gateway.fleet
            # Whichever is first sets the spec; the other one stays out.
            await eventually(lambda: any("hidden_size" in engine.reason for engine in fleet.engines))
            assert len(fleet.ready()) == 1

    run(scenario())


def test_engine_is_brought_to_the_active_draft(tmp_path: Path) -> None:
    async def scenario() -> None:
        for _ in range(3):
            publish(tmp_path)
        store = DraftStore(tmp_path)
        store.set_active(2)
        async with running(tmp_path, engine_versions=(2, 0)) as rig:
            assert [engine.draft_version for engine in rig.engines] == [2, 2]
            assert (await rig.complete()).headers["X-Paceline-Draft-Version"] == "2"

    run(scenario())


def test_engine_that_cannot_be_brought_to_the_active_draft_serves_all_the_same(tmp_path: Path) -> None:
    async def scenario() -> None:
        for _ in range(2):
            publish(tmp_path)
        DraftStore(tmp_path).set_active(1)

        def spoil(engines: list[FakeEngine]) -> None:
            engines[0].refuse_stage[1] = "no memory"

        async with running(tmp_path, engine_versions=(0,), before=spoil) as rig:
            reply = await rig.complete()
            assert (reply.status, reply.headers["X-Paceline-Draft-Version"]) == (200, "0")
            assert "no memory" in (await rig.status())["engines"][0]["reason"]

    run(scenario())


def test_restarted_engine_gets_the_active_draft_and_the_capture_rate(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            assert (await rig.admin("POST", "/admin/capture", json={"rate": 0.25})).status == 200
            await rig.activate(publish(tmp_path), 0)
            await rig.engine.stop()
            await eventually(lambda: not rig.gateway.fleet.ready())
            assert (await rig.complete()).status == 503
            rig.engine.capture_rate = 1.0
            await rig.engine.restart(draft_version=0)
            await eventually(lambda: bool(rig.gateway.fleet.ready()))
            assert (rig.engine.draft_version, rig.engine.capture_rate) == (1, 0.25)
            assert (await rig.complete()).headers["X-Paceline-Draft-Version"] == "1"

    run(scenario())


def test_restart_between_two_probes_is_noticed_by_its_epoch(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            await rig.activate(publish(tmp_path), 0)
            rig.engine.epoch, rig.engine.draft_version = "another", 0
            rig.engine.staged.clear()
            await rig.count(rig.engine, 0, 1, (0,))
            await eventually(lambda: rig.engine.draft_version == 1)

    run(scenario())


def test_draft_changed_behind_the_gateways_back_is_set_right(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            await rig.activate(publish(tmp_path), 0)
            rig.engine.draft_version = 0
            for num_steps in range(1, 4):
                await rig.count(rig.engine, 0, num_steps, (0,))
            await eventually(lambda: rig.engine.draft_version == 1)

    run(scenario())


def _another_process(engine: FakeEngine) -> None:
    engine.epoch = "another"


def _another_target(engine: FakeEngine) -> None:
    engine.target_version = 7


@pytest.mark.parametrize("change", [_another_process, _another_target])
def test_change_that_only_the_cores_probe_sees_is_taken_up_and_empties_the_index(tmp_path: Path, change) -> None:  # type: ignore[no-untyped-def]
    async def scenario() -> None:
        settings = {"core_interval_s": 0.02}
        async with running(tmp_path, num_engines=2, kv_events_endpoint="tcp://127.0.0.1:*", settings=settings) as rig:
            index, engine = rig.gateway.kv_index, rig.gateway.fleet.engines[0]
            await _feeds_have_begun(rig)
            for one in rig.engines:
                assert index.store(one.id, [b"a", b"b"], None, list(range(32)), 16)
            change(rig.engine)
            await eventually(lambda: (engine.epoch, engine.target_version) == (rig.engine.epoch, rig.engine.target_version))
            await eventually(lambda: index.num_held("engine-0") == 0)
            assert index.num_held("engine-1") == 2
            num_calls = len(rig.engine.calls)
            await eventually(lambda: len(rig.engine.calls) > num_calls + 3)
            assert engine.ready

    run(scenario())


def test_engine_that_answers_no_probe_stops_getting_requests(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, num_engines=2, settings={"health_timeout_s": 0.5}) as rig:
            rig.engines[0].health_gate = gate = asyncio.Event()
            await eventually(lambda: len(rig.gateway.fleet.ready()) == 1)
            assert "did not answer" in (await rig.status())["engines"][0]["reason"]
            assert (await rig.complete()).status == 200
            gate.set()
            await eventually(lambda: len(rig.gateway.fleet.ready()) == 2)

    run(scenario())


def test_engine_whose_core_hangs_stops_getting_requests_until_it_answers(tmp_path: Path) -> None:
    async def scenario() -> None:
        settings = {"core_interval_s": 0.02, "core_timeout_s": 1.0}
        async with running(tmp_path, settings=settings) as rig:
            engine = rig.gateway.fleet.engines[0]
            rig.engine.core_gate = gate = asyncio.Event()
            await eventually(lambda: not engine.ready)
            ready = await rig.request("GET", "/ready")
            assert (ready.status, ready.code) == (503, "not_ready")
            assert "the engine core does not answer" in ready.json["error"]["message"]
            reply = await rig.complete()
            assert (reply.status, reply.code, reply.headers["Retry-After"]) == (503, "no_engine_ready", "10")
            engine.suspect("failed a request")
            await eventually(lambda: engine.reason == "the engine core does not answer")
            await rig.engine.stop()
            await eventually(lambda: "does not accept connections" in engine.reason)
            gate.set()
            await rig.engine.start()
            await eventually(lambda: engine.ready)
            assert (await rig.complete()).status == 200

    run(scenario())


def test_one_missed_core_probe_is_forgiven(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, settings={"core_interval_s": 0.05, "core_timeout_s": 1.0}) as rig:
            engine, num_calls = rig.gateway.fleet.engines[0], len(rig.engine.calls)
            rig.engine.core_gate = asyncio.Event()
            await eventually(lambda: len(rig.engine.calls) == num_calls + 1)
            rig.engine.core_gate = None  # the probe that waits for it goes on waiting
            await eventually(lambda: len(rig.engine.calls) >= num_calls + 3)
            assert engine.ready

    run(scenario())


def test_reasons_do_not_name_the_engines_address(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            port = rig.engine.endpoint.url.rsplit(":", 1)[1]
            await rig.engine.stop()
            for _ in range(3):
                bodies = [(await rig.complete()).body, (await rig.request("GET", "/ready")).body]
                assert not [body for body in bodies if port.encode() in body or b"127.0.0.1" in body]
                await asyncio.sleep(0.05)

    run(scenario())


def test_what_a_restarted_engine_held_is_forgotten(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, num_engines=2, kv_events_endpoint="tcp://127.0.0.1:*") as rig:
            index = rig.gateway.kv_index
            await _feeds_have_begun(rig)
            for engine in rig.engines:
                assert index.store(engine.id, [b"a", b"b"], None, list(range(32)), 16)
            await rig.engine.stop()
            await eventually(lambda: not rig.gateway.fleet.engines[0].ready)
            assert index.num_held("engine-0") == 2, "a process that is only slow still has them"
            await rig.engine.restart(draft_version=0)
            await eventually(lambda: index.num_held("engine-0") == 0)
            assert index.num_held("engine-1") == 2

    run(scenario())
