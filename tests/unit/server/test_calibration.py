"""Whether the gate's simulated AL tells what drafts do when they serve: pairs, bias and correlation, and where they are shown."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest
from gateway_rig import ACCEPTED, GatewayRig, publish, publish_target, run, running

from server.calibration import calibrate
from server.tally import Tally
from wire.artifact import DraftManifest, read_manifest, write_manifest
from wire.control import AdminStatus, CalibrationView
from wire.store import DraftStore

SIMULATED = {1: 1.5, 2: 1.7, 3: 1.9}
SERVED_AL = {1: 1.4, 2: 1.55, 3: 1.85}


def _tally(al: float, num_steps: int = 1000) -> Tally:
    return Tally(num_steps, (num_steps, num_steps), (round((al - 1) * num_steps * 0.7), round((al - 1) * num_steps * 0.3)))


def _of(*versions: int) -> CalibrationView:
    return calibrate(SIMULATED, {version: _tally(SERVED_AL[version]) for version in versions}, min_verify_steps=200)


def test_pairs_bias_and_correlation_of_three_drafts() -> None:
    view = _of(1, 2, 3)
    assert [(pair.version, pair.simulated_al, round(pair.served_al, 6)) for pair in view.pairs] == [
        (1, 1.5, 1.4),
        (2, 1.7, 1.55),
        (3, 1.9, 1.85),
    ]
    assert view.bias == pytest.approx(-0.1)
    assert view.correlation == pytest.approx(0.9820, abs=1e-4)


def test_two_drafts_have_a_bias_and_no_correlation() -> None:
    assert _of(1, 2).bias == pytest.approx(-0.125)
    assert _of(1, 2).correlation is None
    assert _of() == CalibrationView()


def test_drafts_that_are_all_alike_have_no_correlation() -> None:
    same = dict.fromkeys(SIMULATED, 1.5)
    assert calibrate(same, {version: _tally(1.4) for version in same}, min_verify_steps=200).correlation is None


def test_a_draft_without_a_gate_or_with_few_verify_steps_is_no_pair() -> None:
    view = calibrate(SIMULATED, {0: _tally(1.2), 1: _tally(1.4, 199), 2: _tally(1.5, 200)}, min_verify_steps=200)
    assert [pair.version for pair in view.pairs] == [2]


def test_served_al_is_that_of_the_full_depth_where_depth_was_lower_at_times() -> None:
    half_at_depth_one = Tally(1000, (1000, 500), (500, 100))
    assert calibrate(SIMULATED, {1: half_at_depth_one}, min_verify_steps=200).pairs[0].served_al == pytest.approx(1.7)


async def _serve_all(rig: GatewayRig) -> None:
    for version, al in SERVED_AL.items():
        tally = _tally(al)
        await rig.count(rig.engine, version, tally.num_verify_steps, tally.accepted)


async def _serve_three_pairs(rig: GatewayRig) -> None:
    for al in SIMULATED.values():
        publish(rig.state_dir, gate=msgspec.structs.replace(ACCEPTED, candidate_al=al))
    for version in SIMULATED:
        await rig.activate(version, version - 1)
    await _serve_all(rig)
    assert await rig.metric("paceline_calibration_pairs") == 3.0


def test_a_swap_reports_the_draft_it_ends_and_the_page_metrics_and_status_show_them_all(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            await _serve_three_pairs(rig)
            assert await rig.metric("paceline_calibration_bias") == pytest.approx(-0.1)
            assert await rig.metric("paceline_calibration_correlation") == pytest.approx(0.982, abs=1e-3)
            status = msgspec.convert(await rig.status(), AdminStatus)
            assert [pair.version for pair in status.calibration.pairs] == [1, 2, 3]
            history = (await rig.admin("GET", "/admin/history")).json
            assert msgspec.convert(history["calibration"], CalibrationView) == status.calibration
            body = {"expected_active": 3, "force": True, "reason": "floor: it is better"}
            report = (await rig.admin("POST", "/admin/drafts/0/activate", json=body)).json
            assert report["reason"] == "floor: it is better"
            assert report["served"] == msgspec.to_builtins(status.calibration.pairs[-1])
            assert report["correlation"] == status.calibration.correlation

    run(scenario())


def test_a_restarted_gateway_knows_it_again_from_manifests_and_engines(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path):
            for al in SIMULATED.values():
                publish(tmp_path, gate=msgspec.structs.replace(ACCEPTED, candidate_al=al))
        async with running(tmp_path) as rig:
            await _serve_all(rig)
            view = msgspec.convert((await rig.status())["calibration"], CalibrationView)
            assert [(pair.version, pair.simulated_al) for pair in view.pairs] == list(SIMULATED.items())

    run(scenario())


def test_after_a_change_of_the_target_only_drafts_made_for_it_are_pairs(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            await _serve_three_pairs(rig)
            publish_target(tmp_path)
            assert (await rig.activate_target(1, 0)).status == 200
            assert await rig.metric("paceline_calibration_pairs") == 0.0
            assert (await rig.activate(2, 3, force=True)).status == 200
            assert await rig.metric("paceline_calibration_pairs") == 0.0, "it was judged on the target before"
            version = _publish_now(tmp_path, 1.6)
            assert (await rig.activate(version, 2)).status == 200
            await _assert_only_pair(rig, version, 1.6)
        async with running(tmp_path) as rig:
            await _serve_all(rig)
            await _assert_only_pair(rig, version, 1.6)

    run(scenario())


def _publish_now(state_dir: Path, simulated_al: float) -> int:
    version = publish(state_dir, gate=msgspec.structs.replace(ACCEPTED, candidate_al=simulated_al))
    directory = DraftStore(state_dir).directory(version)
    write_manifest(directory, msgspec.structs.replace(read_manifest(directory, DraftManifest), created_at_s=time.time()))
    return version


async def _assert_only_pair(rig: GatewayRig, version: int, simulated_al: float) -> None:
    tally = _tally(1.5)
    await rig.count(rig.engine, version, tally.num_verify_steps, tally.accepted)
    view = msgspec.convert((await rig.status())["calibration"], CalibrationView)
    assert [(pair.version, pair.simulated_al) for pair in view.pairs] == [(version, simulated_al)]
