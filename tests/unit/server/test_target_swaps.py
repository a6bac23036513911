"""Versions of the target on all engines or none: no engine serves one that is not the active one, whatever fails in between."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import msgspec
import pytest
from gateway_rig import GatewayRig, eventually, publish, publish_target, run, running, target_commits
from samples import CANARY, SPEC
from waiting import DEADLINE_S

from server.config import CanarySettings
from wire.control import AdminStatus
from wire.target import TargetStore
from wire.target_control import TargetList, TargetSwapReport


async def _serves(rig: GatewayRig, version: int) -> None:
    """The whole system agrees on `version`, and requests run."""
    assert [engine.target_version for engine in rig.engines] == [version] * len(rig.engines)
    assert (await rig.status())["active_target_version"] == version
    assert {engine["target_version"] for engine in (await rig.status())["engines"]} == {version}
    reply = await rig.complete()
    assert (reply.status, reply.headers["X-Paceline-Target-Version"]) == (200, str(version))


def test_activate_changes_every_engine_asks_the_canary_and_moves_the_pointer(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, num_engines=2) as rig:
            assert TargetStore(tmp_path).active() is None
            publish_target(tmp_path)
            reply = await rig.activate_target(1, 0, reason="step 10")
            report = msgspec.json.decode(reply.body, type=TargetSwapReport)
            assert (report.outcome, report.version, report.previous, report.persisted) == ("committed", 1, 0, True)
            assert report.reason == "step 10"
            assert report.canary_errors == {"engine-0": 0.0, "engine-1": 0.0}
            assert len({commit.weights_sha256 for commit in report.commits.values()}) == 1
            assert TargetStore(tmp_path).active() == 1
            await _serves(rig, 1)
            for engine in rig.engines:
                (question,) = engine.scored_bodies
                assert question["prompt"] == list(CANARY.token_ids)
                assert question["vllm_xargs"] == {"paceline_capture": 0}
            assert (await rig.activate_target(1, 1)).json["outcome"] == "unchanged"
            listing = msgspec.json.decode((await rig.admin("GET", "/admin/targets")).body, type=TargetList)
            assert (listing.active_version, listing.previous_version) == (1, 0)
            assert [(entry.version, entry.is_active) for entry in listing.targets] == [(1, True)]
            assert [swap.outcome for swap in listing.swaps] == ["committed", "unchanged"]
            assert await rig.metric('paceline_target_swaps_total{outcome="committed",trigger="activate"}') == 1.0
            assert await rig.metric("paceline_target_commit_stall_seconds_count") == 2.0
            assert await rig.metric('paceline_engine_target_version{engine="engine-1"}') == 1.0

    run(scenario())


def test_streams_run_through_a_change_of_target(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            publish_target(tmp_path)
            rig.engine.chunk_gate = gate = asyncio.Event()
            waiting = [asyncio.create_task(rig.complete(stream=True)) for _ in range(8)]
            await eventually(lambda: rig.engine.num_running == 8)
            assert (await rig.activate_target(1, 0)).status == 200
            gate.set()
            for reply in await asyncio.gather(*waiting):
                assert reply.body == b"".join(rig.engine.chunks)

    run(scenario())


def test_roll_back_goes_down_the_lineage_to_the_targets_own_directory(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            for expected in (0, 1):
                publish_target(tmp_path, parent=expected)
                assert (await rig.activate_target(expected + 1, expected)).status == 200
            assert (await rig.roll_back_target(1)).code == "stale_expected_active"
            for version in (1, 0):
                assert (await rig.roll_back_target(version + 1)).json["version"] == version
                assert TargetStore(tmp_path).active() == version
                await _serves(rig, version)
            nowhere = await rig.roll_back_target(0)
            assert (nowhere.status, nowhere.code) == (409, "swap_refused")

    run(scenario())


def test_an_expectation_that_is_stale_changes_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            publish_target(tmp_path)
            reply = await rig.activate_target(1, 5)
            assert (reply.status, reply.code) == (409, "stale_expected_active")
            assert target_commits(rig) == [[]]
            await _serves(rig, 0)

    run(scenario())


def test_one_idempotency_key_is_one_change(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            publish_target(tmp_path)
            first, second = await asyncio.gather(*(rig.activate_target(1, 0, key="k1") for _ in range(2)))
            assert first.status == 200
            assert first.body == second.body == (await rig.activate_target(1, 0, key="k1")).body
            assert target_commits(rig) == [["commit target 1"]]
            assert (await rig.activate_target(1, 1, key="k1")).code == "idempotency_key_reused"

    run(scenario())


def test_drafts_and_targets_change_one_at_a_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            publish_target(tmp_path)
            publish(tmp_path)
            rig.engine.target_gate = gate = asyncio.Event()
            changing = asyncio.create_task(rig.activate_target(1, 0))
            await eventually(lambda: target_commits(rig) == [["commit target 1"]])
            assert (await rig.activate(1, 0)).code == "swap_in_progress"
            assert (await rig.activate_target(1, 0)).code == "swap_in_progress"
            gate.set()
            assert (await changing).status == 200
            assert (await rig.activate(1, 0)).status == 200

    run(scenario())


@pytest.mark.parametrize("version", ["x", "-1", "1.5", "../1"])
def test_only_a_plain_number_names_a_target(tmp_path: Path, version: str) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            assert (await rig.activate_target(version, 0)).status in (400, 404, 405)
            assert target_commits(rig) == [[]]

    run(scenario())


def test_a_version_that_is_not_there_altered_or_of_another_target_is_refused_before_any_engine(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            missing = await rig.activate_target(7, 0)
            assert (missing.status, missing.code) == (404, "target_not_found")
            altered = publish_target(tmp_path)
            TargetStore(tmp_path).weights(altered).write_bytes(b"other")
            assert (await rig.activate_target(altered, 0)).code == "bad_artifact"
            other = publish_target(tmp_path, spec=msgspec.structs.replace(SPEC, target_revision="another"))
            assert (await rig.activate_target(other, 0)).code == "spec_mismatch"
            assert not [call for call in rig.engine.calls if "target" in call]
            await _serves(rig, 0)

    run(scenario())


def test_one_engine_refusing_to_stage_leaves_all_as_they_were(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, num_engines=2) as rig:
            publish_target(tmp_path)
            rig.engines[1].refuse_target_stage[1] = "model.norm.weight has shape [3]"
            reply = await rig.activate_target(1, 0)
            assert (reply.status, reply.code) == (422, "bad_artifact")
            assert "model.norm.weight" in reply.json["error"]["message"]
            assert target_commits(rig) == [[], []]
            await _serves(rig, 0)

    run(scenario())


def test_one_engine_refusing_to_commit_sends_the_others_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, num_engines=2) as rig:
            publish_target(tmp_path)
            rig.engines[1].refuse_target_commit[1] = "its KV could not be dropped"
            reply = await rig.activate_target(1, 0)
            assert (reply.status, reply.code) == (409, "commit_failed")
            assert "could not be dropped" in reply.json["error"]["message"]
            assert target_commits(rig)[0] == ["commit target 1", "commit target 0"]
            await eventually(lambda: len(rig.gateway.fleet.ready()) == 2)
            await _serves(rig, 0)
            assert TargetStore(tmp_path).active() == 0
            swaps = (await rig.admin("GET", "/admin/targets")).json["swaps"]
            assert swaps[-1]["outcome"] == "reverted"

    run(scenario())


BAD_SCORES = {"another number": (-1.0, -2.1), "no number": (-1.0, float("nan")), "too few": (-1.0,)}


@pytest.mark.parametrize("kind", BAD_SCORES)
def test_an_engine_that_fails_the_canary_sends_all_back(tmp_path: Path, kind: str) -> None:
    async def scenario() -> None:
        async with running(tmp_path, num_engines=2) as rig:
            publish_target(tmp_path)
            rig.engines[1].scores[1] = BAD_SCORES[kind]
            reply = await rig.activate_target(1, 0)
            assert (reply.status, reply.code) == (409, "commit_failed")
            assert target_commits(rig) == [["commit target 1", "commit target 0"]] * 2
            await _serves(rig, 0)

    run(scenario())


def test_an_engine_that_read_other_bytes_than_the_gateway_sends_all_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            publish_target(tmp_path)
            rig.engine.read_sha256[1] = "0" * 64
            reply = await rig.activate_target(1, 0)
            assert "checksum 000000000000" in reply.json["error"]["message"]
            await _serves(rig, 0)

    run(scenario())


def test_an_engine_that_cannot_go_back_serves_nobody_until_it_is_at_the_active_target(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, num_engines=2) as rig:
            publish_target(tmp_path)
            stuck = rig.gateway.fleet.engines[0]
            rig.engines[0].fails_to_go_back = True
            rig.engines[1].refuse_target_commit[1] = "no"
            assert (await rig.activate_target(1, 0)).code == "commit_failed"
            await eventually(lambda: "not the active 0" in stuck.reason or "core died" in stuck.reason)
            assert not stuck.ready
            for _ in range(4):
                assert (await rig.complete()).headers["X-Paceline-Target-Version"] == "0"
            rig.engines[0].fails_to_go_back = False
            await eventually(lambda: stuck.ready)
            await _serves(rig, 0)

    run(scenario())


def test_an_engine_that_starts_again_is_brought_to_the_active_target_before_it_serves(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, num_engines=2) as rig:
            publish_target(tmp_path)
            assert (await rig.activate_target(1, 0)).status == 200
            late, known = rig.engines[1], rig.gateway.fleet.engines[1]
            late.target_gate = gate = asyncio.Event()
            await late.restart(draft_version=0)
            await eventually(lambda: late.calls.count("commit target 1") == 2)
            assert not known.ready
            gate.set()
            await eventually(lambda: known.ready)
            await _serves(rig, 1)

    run(scenario())


def test_an_engine_that_started_again_before_anybody_missed_it_gets_no_requests_either(tmp_path: Path) -> None:
    async def scenario() -> None:
        settings = {"health_interval_s": 30.0, "core_interval_s": 0.02}
        async with running(tmp_path, num_engines=2, settings=settings, wait_ready=False) as rig:
            await eventually(lambda: len(rig.gateway.fleet.ready()) == 2)
            publish_target(tmp_path)
            assert (await rig.activate_target(1, 0)).status == 200
            late, known = rig.engines[1], rig.gateway.fleet.engines[1]
            late.target_gate = gate = asyncio.Event()
            late.epoch, late.target_version = "another process", 0
            late.staged_targets.clear()
            await eventually(lambda: late.calls.count("commit target 1") == 2)
            assert not known.ready
            gate.set()
            await eventually(lambda: known.ready)
            await _serves(rig, 1)

    run(scenario())


@pytest.mark.parametrize("kind", BAD_SCORES)
def test_an_engine_that_comes_back_and_fails_the_canary_does_not_serve(tmp_path: Path, kind: str) -> None:
    async def scenario() -> None:
        async with running(tmp_path, num_engines=2) as rig:
            publish_target(tmp_path)
            assert (await rig.activate_target(1, 0)).status == 200
            late, known = rig.engines[1], rig.gateway.fleet.engines[1]
            late.scores[1] = BAD_SCORES[kind]
            await late.restart(draft_version=0)
            await eventually(lambda: late.calls.count("commit target 1") >= 4)
            assert not known.ready
            assert "not the active 1" in known.reason
            late.scores.clear()
            await eventually(lambda: known.ready)
            await _serves(rig, 1)

    run(scenario())


def test_an_engine_that_comes_back_during_a_change_waits_for_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, num_engines=2) as rig:
            publish_target(tmp_path)
            slow, late = rig.engines
            known = rig.gateway.fleet.engines[1]
            await late.stop()
            await eventually(lambda: not known.ready)
            slow.target_gate = gate = asyncio.Event()
            changing = asyncio.create_task(rig.activate_target(1, 0))
            await eventually(lambda: "commit target 1" in slow.calls)
            num_calls = len(late.calls)
            await late.start()
            await eventually(lambda: len(late.calls) > num_calls)
            await asyncio.sleep(0.1)
            assert not known.ready
            gate.set()
            assert (await changing).status == 200
            await eventually(lambda: known.ready)
            await _serves(rig, 1)

    run(scenario())


def test_an_engine_that_dies_during_a_change_sends_the_others_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, num_engines=2) as rig:
            publish_target(tmp_path)
            rig.engines[1].hang_target_commit = True
            changing = asyncio.create_task(rig.activate_target(1, 0))
            await eventually(lambda: "commit target 1" in rig.engines[1].calls)
            await rig.engines[1].stop()
            assert (await changing).code == "commit_failed"
            assert rig.engines[0].target_version == 0
            rig.engines[1].hang_target_commit = False
            await rig.engines[1].restart(draft_version=0)
            await eventually(lambda: len(rig.gateway.fleet.ready()) == 2)
            await _serves(rig, 0)

    run(scenario())


def test_a_gateway_that_is_started_anew_brings_all_engines_to_the_pointer(tmp_path: Path) -> None:
    """Also where the one before died between two engines."""

    async def scenario() -> None:
        for _ in range(2):
            publish_target(tmp_path)
        TargetStore(tmp_path).set_active(1)

        def half_changed(engines: list) -> None:
            engines[0].target_version = 2

        async with running(tmp_path, num_engines=2, before=half_changed) as rig:
            await _serves(rig, 1)
            assert (await rig.roll_back_target(1)).json["version"] == 0

    run(scenario())


def test_a_pointer_that_cannot_be_written_refuses_the_first_change(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            publish_target(tmp_path)
            (tmp_path / "targets" / "active").mkdir()
            reply = await rig.activate_target(1, 0)
            assert (reply.status, reply.code) == (422, "bad_artifact")
            assert "cannot be written down" in reply.json["error"]["message"]
            await _serves(rig, 0)

    run(scenario())


def test_a_pointer_that_cannot_be_moved_leaves_the_new_target_serving_and_is_told(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            for _ in range(2):
                publish_target(tmp_path)
            assert (await rig.activate_target(1, 0)).json["persisted"] is True
            pointer = tmp_path / "targets" / "active"
            pointer.unlink()
            pointer.mkdir()
            reply = await rig.activate_target(2, 1, reason="step 2")
            assert (reply.status, reply.json["outcome"], reply.json["persisted"]) == (200, "committed", False)
            assert reply.json["reason"].startswith("step 2; it serves, but the pointer on disk still names the old target")
            await _serves(rig, 2)
            assert (await rig.roll_back_target(2)).json["version"] == 1
            await _serves(rig, 1)

    run(scenario())


def test_no_canary_and_no_floor_watch_blames_a_draft_for_another_target(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, canary=CanarySettings(check_every_s=0.01)) as rig:
            await rig.count(rig.engine, 0, 400, (300, 200, 100))
            assert (await rig.activate(publish(tmp_path, parent=0), 0)).status == 200
            await eventually(lambda: rig.gateway.floor_watch.view.version == 1)
            await rig.count(rig.engine, 1, 10, (8, 6, 4))
            await eventually(lambda: bool(rig.gateway.floor_watch.view.domains))
            assert (await rig.status())["canary"]["state"] == "watching"
            publish_target(tmp_path)
            report = (await rig.activate_target(1, 0)).json
            assert report["acceptance_length"] == pytest.approx(2.8)
            status = msgspec.convert(await rig.status(), AdminStatus)
            assert (status.canary.state, status.canary.reason) == ("superseded", "target 1 was activated")
            assert status.acceptance is None
            await eventually(lambda: not rig.gateway.floor_watch.view.domains)
            await rig.count(rig.engine, 1, 400, (10, 0, 0))
            await eventually(lambda: bool(rig.gateway.floor_watch.view.domains))
            assert rig.gateway.floor_watch.view.state == "unknown"
            assert (await rig.status())["active_version"] == 1

    run(scenario())


def test_depth_knows_of_no_acceptance_under_another_target(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            await rig.count(rig.engine, 0, 100, (80, 60, 40))
            await rig.count(rig.engine, 0, 5000, (4000, 3000, 2000))
            controller = rig.gateway.depth.controllers()["engine-0"]
            assert controller.shares[0].mean == pytest.approx(0.8, abs=0.02)
            known = controller.shares[0].deviation
            publish_target(tmp_path)
            assert (await rig.activate_target(1, 0)).status == 200
            assert rig.gateway.depth.controllers()["engine-0"] is controller
            assert controller.shares[0].deviation > 3 * known
            await rig.count(rig.engine, 0, 9000, (4400, 3000, 2000))
            assert controller.shares[0].mean == pytest.approx(0.1, abs=0.02)

    run(scenario())


def test_a_core_that_is_silent_while_it_loads_a_target_is_not_given_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        settings = {"core_interval_s": 0.01, "core_timeout_s": 0.02}
        async with running(tmp_path, num_engines=2, settings=settings) as rig:
            publish_target(tmp_path)
            busy, known = rig.engines[0], rig.gateway.fleet.engines[0]
            busy.target_gate, busy.core_gate = asyncio.Event(), asyncio.Event()
            changing = asyncio.create_task(rig.activate_target(1, 0))
            await eventually(lambda: "commit target 1" in busy.calls)
            num_asked = busy.calls.count("status")
            await eventually(lambda: busy.calls.count("status") >= num_asked + 6)
            assert known.ready
            assert not known.is_lost
            busy.target_gate.set()
            busy.core_gate.set()
            assert (await changing).status == 200
            busy.core_gate = asyncio.Event()
            await eventually(lambda: not known.ready)
            busy.core_gate.set()

    run(scenario())


def test_word_from_before_a_change_does_not_take_it_back(tmp_path: Path) -> None:
    """Counters travel beside the commit, and may come after it. What goes on saying so is asked, and brought into line."""

    async def scenario() -> None:
        settings = {"health_interval_s": 30.0, "core_interval_s": 30.0}
        async with running(tmp_path, settings=settings, wait_ready=False) as rig:
            await eventually(lambda: len(rig.gateway.fleet.ready()) == 1)
            await rig.count(rig.engine, 0, 1, (0, 0, 0))
            publish_target(tmp_path)
            assert (await rig.activate_target(1, 0)).status == 200
            (known,) = rig.gateway.fleet.engines
            rig.engine.target_version = 0
            rig.engine.num_captured_rows = 7
            await rig.engine.publish_stats()
            await eventually(lambda: rig.gateway.ledger.num_captured_rows == 7)
            assert known.target_version == 1
            assert target_commits(rig) == [["commit target 1"]]

            async def brought_back() -> bool:
                await rig.engine.publish_stats()
                return target_commits(rig) == [["commit target 1"] * 2]

            async with asyncio.timeout(10):
                while not await brought_back():
                    await asyncio.sleep(0.01)
            await eventually(lambda: known.ready)
            await _serves(rig, 1)

    run(scenario())


@pytest.mark.parametrize("deadline_s", [0, -1, 1e9, "soon"])
def test_a_deadline_is_a_number_of_seconds(tmp_path: Path, deadline_s: object) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            publish_target(tmp_path)
            assert (await rig.activate_target(1, 0, deadline_s=deadline_s)).code == "bad_body"
            assert target_commits(rig) == [[]]

    run(scenario())


def test_a_version_that_is_not_there_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            publish(tmp_path, parent=0)
            looking, go_on = threading.Event(), threading.Event()
            directory = rig.gateway.target.targets.store.directory

            def slow(version: int) -> Path:
                looking.set()
                go_on.wait(DEADLINE_S)
                return directory(version)

            monkeypatch.setattr(rig.gateway.target.targets.store, "directory", slow)
            missing = asyncio.create_task(rig.activate_target(99, 0))
            await eventually(looking.is_set)
            assert (await rig.activate(1, 0)).status == 200, "another swap is not held up"
            go_on.set()
            assert ((await missing).status, (await missing).code) == (404, "target_not_found")
            assert [report.outcome for report in rig.gateway.target.history] == ["refused"]

    run(scenario())
