"""The canary on a running gateway: engine counters in, a verdict and perhaps a roll back out."""

from __future__ import annotations

from pathlib import Path

from gateway_rig import GatewayRig, eventually, publish, run, running

from server.config import CanarySettings

CANARY = CanarySettings(min_verify_steps=100, max_relative_drop=0.1, check_every_s=0.01)


async def _canary(rig: GatewayRig, state: str) -> None:
    await eventually(lambda: rig.gateway.canary.view.state == state)


def test_good_draft_passes_and_becomes_trusted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, canary=CANARY) as rig:
            await rig.count(rig.engine, 0, 1000, (500, 200))
            await rig.activate(publish(tmp_path), 0)
            assert (await rig.status())["canary"]["state"] == "watching"
            await rig.count(rig.engine, 1, 200, (120, 60))
            await _canary(rig, "passed")
            canary = (await rig.status())["canary"]
            assert (canary["acceptance_length"], canary["baseline_acceptance_length"]) == (1.9, 1.7)
            assert rig.engine.draft_version == 1
            assert await rig.metric('paceline_canary_verdicts_total{outcome="passed"}') == 1.0

    run(scenario())


def test_bad_draft_is_rolled_back_and_refused_without_force(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, num_engines=2, canary=CANARY) as rig:
            for engine in rig.engines:
                await rig.count(engine, 0, 1000, (700, 400))
            await rig.activate(publish(tmp_path), 0)
            await rig.count(rig.engines[0], 1, 60, (3, 0))
            assert rig.gateway.canary.view.state == "watching"
            await rig.count(rig.engines[1], 1, 60, (2, 0))
            await _canary(rig, "rolled_back")
            assert [engine.draft_version for engine in rig.engines] == [0, 0]
            status = await rig.status()
            assert (status["active_version"], status["rolled_back_versions"]) == (0, [1])
            swap = status["swaps"][-1]
            assert (swap["trigger"], swap["outcome"]) == ("canary", "committed")
            assert "AL 1.042 against 2.100" in swap["reason"]
            refused = await rig.activate(1, 0)
            assert (refused.status, refused.code) == (409, "draft_not_accepted")
            assert "rolled back" in refused.json["error"]["message"]
            assert (await rig.activate(1, 0, force=True)).status == 200

    run(scenario())


def test_two_roll_backs_in_a_row_go_to_the_floor(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, canary=CANARY) as rig:
            await rig.count(rig.engine, 0, 1000, (500,))
            await rig.activate(publish(tmp_path), 0)
            await rig.count(rig.engine, 1, 1000, (700,))
            await _canary(rig, "passed")
            for expected_active, version in ((1, 1), (0, 0)):
                bad = publish(tmp_path)
                assert (await rig.activate(bad, 1)).status == 200
                await rig.count(rig.engine, bad, 300, (0,))
                await _canary(rig, "rolled_back")
                assert rig.engine.draft_version == version, expected_active

    run(scenario())


def test_undecided_draft_replaced_by_another_is_no_baseline(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, canary=CANARY) as rig:
            await rig.count(rig.engine, 0, 1000, (700,))
            await rig.activate(publish(tmp_path), 0)
            await rig.count(rig.engine, 1, 50, (0,))
            await rig.activate(publish(tmp_path), 1)
            assert (await rig.status())["canary"]["baseline_version"] == 0
            await rig.count(rig.engine, 2, 200, (0,))
            await _canary(rig, "rolled_back")
            assert rig.engine.draft_version == 0

    run(scenario())


def test_canary_without_traffic_ends_undecided_and_the_draft_stays(tmp_path: Path) -> None:
    async def scenario() -> None:
        canary = CanarySettings(deadline_s=0.05, check_every_s=0.01)
        async with running(tmp_path, canary=canary) as rig:
            await rig.activate(publish(tmp_path), 0)
            await _canary(rig, "undecided")
            assert rig.engine.draft_version == 1

    run(scenario())


def test_roll_back_the_engine_refuses_is_tried_again_later(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, canary=CANARY) as rig:
            await rig.count(rig.engine, 0, 1000, (700,))
            await rig.activate(publish(tmp_path), 0)
            rig.engine.refuse_commit[0] = "busy"
            await rig.count(rig.engine, 1, 200, (0,))
            await eventually(lambda: "rolling back failed" in rig.gateway.canary.view.reason)
            assert (await rig.complete()).headers["X-Paceline-Draft-Version"] == "1"
            swaps = (await rig.status())["swaps"]
            assert [swap["outcome"] for swap in swaps] == ["committed", "refused"]

    run(scenario())


def test_counters_of_a_restarted_engine_start_anew(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, canary=CANARY) as rig:
            await rig.count(rig.engine, 0, 1000, (500,))
            await rig.engine.restart(draft_version=0)
            await rig.count(rig.engine, 0, 10, (5,))
            assert (
                await rig.metric('paceline_verify_steps_total{domain="default",draft_version="0",tenant="default"}') == 1010.0
            )

    run(scenario())
