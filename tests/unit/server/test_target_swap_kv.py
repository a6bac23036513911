"""A change of the target where engines hold KV for one another: none of the old target's is pulled by the new one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from gateway_rig import eventually, publish_target, run, running, target_commits

from server.config import PoolKind
from server.relay.prefill import Lease

KINDS: tuple[PoolKind, ...] = ("decode", "prefill", "decode")


def test_kv_held_for_others_by_an_engine_that_is_away_refuses_the_change(tmp_path: Path) -> None:
    """It could be pulled after the change, and nobody could make that engine drop it."""

    async def scenario() -> None:
        async with running(tmp_path, kinds=("decode", "prefill")) as rig:
            publish_target(tmp_path)
            away = rig.gateway.fleet.engines[1]
            await rig.engines[1].stop()
            await eventually(lambda: not away.ready)
            away.leases.add(lease := Lease(away, msgspec.Raw(b"{}")))
            reply = await rig.activate_target(1, 0)
            assert (reply.status, reply.code) == (409, "swap_refused")
            assert "engine-1" in reply.json["error"]["message"]
            assert target_commits(rig)[0] == []
            lease.pull()
            assert (await rig.activate_target(1, 0)).status == 200

    run(scenario())


def test_prefill_engines_change_first_and_hand_nothing_over_meanwhile(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, kinds=KINDS) as rig:
            publish_target(tmp_path)
            prefill = rig.gateway.fleet.engines[1]
            rig.engines[1].leases.add("waits to be pulled")
            changing = asyncio.create_task(rig.activate_target(1, 0))
            await eventually(lambda: target_commits(rig)[1] == ["commit target 1"])
            assert not prefill.takes_prefills
            assert prefill.ready
            assert target_commits(rig)[0] == target_commits(rig)[2] == []
            rig.engines[1].leases.clear()
            assert (await changing).status == 200
            assert prefill.takes_prefills
            assert [engine.target_version for engine in rig.engines] == [1, 1, 1]

    run(scenario())


def test_kv_that_stays_held_for_others_refuses_the_change_at_its_deadline(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, kinds=KINDS) as rig:
            publish_target(tmp_path)
            rig.engines[1].leases.add("is never pulled")
            rig.gateway.target._deadline_s = 0.2
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("server.target_rollout.MIN_COMMIT_TIMEOUT_S", 0.2)
                assert (await rig.activate_target(1, 0)).code == "commit_failed"
            assert target_commits(rig)[0] == target_commits(rig)[2] == []
            await eventually(lambda: len(rig.gateway.fleet.ready()) == 3)
            assert [engine.target_version for engine in rig.engines] == [0, 0, 0]

    run(scenario())


def test_kv_that_is_prefilled_while_the_target_changes_is_not_pulled(tmp_path: Path) -> None:
    """It was computed by one target or the other, and the decode engine may be at either."""

    async def scenario() -> None:
        async with running(tmp_path, kinds=("decode", "prefill")) as rig:
            decode, prefill = rig.engines
            for engine in rig.gateway.fleet.engines:
                for _ in range(20):
                    seconds = 0.1 if engine.kind == "prefill" else 1000.0
                    rig.gateway.router.costs.learn_prefill(engine, seconds, 1000, 0)
            publish_target(tmp_path)
            prefill.first_gate, decode.target_gate = asyncio.Event(), asyncio.Event()
            asking = asyncio.create_task(rig.complete(prompt=list(range(300)), stream=True))
            await eventually(lambda: prefill.num_running == 1)
            changing = asyncio.create_task(rig.activate_target(1, 0))
            await eventually(lambda: target_commits(rig)[0] == ["commit target 1"])
            assert (prefill.target_version, decode.target_version) == (1, 0)
            prefill.first_gate.set()
            assert (await asking).status == 200
            assert prefill.num_leases == 1
            assert decode.num_pulled == 0
            await eventually(lambda: not prefill.leases)
            decode.target_gate.set()
            assert (await changing).status == 200

    run(scenario())
