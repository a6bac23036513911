"""Activation, roll back, and every way a draft can be bad: refused with a reason while the old draft serves on."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import msgspec
import pytest
from gateway_rig import OPERATOR_TOKEN, REJECTED, SPEC, GatewayRig, eventually, publish, run, running
from yarl import URL

from server import disk
from server.drafts import Drafts
from wire.artifact import CONFIG_FILE, MANIFEST_FILE, WEIGHTS_FILE, DraftManifest
from wire.control import AdminStatus, DraftEntry, DraftList, SwapReport
from wire.store import DraftStore


async def _serves(rig: GatewayRig, version: int) -> None:
    """The whole system agrees on `version`, and requests run."""
    assert [engine.draft_version for engine in rig.engines] == [version] * len(rig.engines)
    assert (await rig.status())["active_version"] == version
    assert DraftStore(rig.state_dir).active() == version
    reply = await rig.complete()
    assert (reply.status, reply.headers["X-Paceline-Draft-Version"]) == (200, str(version))


def test_activate_commits_on_every_engine_and_moves_the_pointer(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, num_engines=2) as rig:
            version = publish(tmp_path, parent=0)
            reply = await rig.activate(version, 0)
            report = msgspec.json.decode(reply.body, type=SwapReport)
            assert (report.outcome, report.version, report.previous, report.persisted) == ("committed", 1, 0, True)
            assert report.commits["engine-1"].rpc_ms == 20.0
            await _serves(rig, 1)
            again = await rig.activate(version, 1)
            assert again.json["outcome"] == "unchanged"
            status = msgspec.convert(await rig.status(), AdminStatus)
            assert (status.previous_version, status.floor_version) == (0, 0)
            assert [swap.outcome for swap in status.swaps] == ["committed", "unchanged"]
            assert await rig.metric('paceline_swaps_total{outcome="committed",trigger="activate"}') == 1.0
            assert await rig.metric('paceline_commit_stall_seconds_count{phase="rpc"}') == 2.0

    run(scenario())


def test_streams_run_through_a_swap(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            publish(tmp_path)
            rig.engine.chunk_gate = gate = asyncio.Event()
            waiting = [asyncio.create_task(rig.complete(stream=True)) for _ in range(8)]
            await eventually(lambda: rig.engine.num_running == 8)
            assert (await rig.activate(1, 0)).status == 200
            gate.set()
            for reply in await asyncio.gather(*waiting):
                assert reply.body == b"".join(rig.engine.chunks)

    run(scenario())


def test_roll_back_walks_down_the_lineage(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            for expected in (0, 1):
                assert (await rig.activate(publish(tmp_path), expected)).status == 200
            stale = await rig.admin("POST", "/admin/drafts/rollback", json={"expected_active": 0})
            assert (stale.status, stale.code) == (409, "stale_expected_active")
            for version in (1, 0):
                reply = await rig.admin("POST", "/admin/drafts/rollback")
                assert (reply.status, reply.json["version"]) == (200, version)
                await _serves(rig, version)
            nowhere = await rig.admin("POST", "/admin/drafts/rollback")
            assert (nowhere.status, nowhere.code) == (409, "swap_refused")
            message = nowhere.json["error"]["message"]
            assert message == "draft 0 is active and is the floor itself; there is nothing earlier to go back to"

    run(scenario())


def test_restarted_gateway_finds_the_previous_draft_in_the_manifest(tmp_path: Path) -> None:
    async def scenario() -> None:
        publish(tmp_path, gate=None)
        store = DraftStore(tmp_path)
        store.set_floor(0)
        store.set_active(publish(tmp_path, parent=0))
        async with running(tmp_path) as rig:
            assert (await rig.status())["previous_version"] == 0
            assert (await rig.admin("POST", "/admin/drafts/rollback")).status == 200
            await _serves(rig, 0)

    run(scenario())


def test_a_parent_is_found_where_many_drafts_came_after_the_active_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.drafts.MAX_MARKS", 2)
    publish(tmp_path, gate=None)
    store = DraftStore(tmp_path)
    store.set_active(publish(tmp_path, parent=0))
    for _ in range(3):
        publish(tmp_path, parent=1)
    assert Drafts(store).previous == 0


def test_roll_back_goes_to_the_floor_when_the_previous_draft_is_gone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            for expected in (0, 1):
                await rig.activate(publish(tmp_path), expected)
            (DraftStore(tmp_path).directory(1) / WEIGHTS_FILE).unlink()
            reply = await rig.admin("POST", "/admin/drafts/rollback")
            assert reply.json["version"] == 0
            await _serves(rig, 0)

    run(scenario())


def test_compare_and_swap_refuses_a_stale_expectation(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            reply = await rig.activate(publish(tmp_path), 5)
            assert (reply.status, reply.code) == (409, "stale_expected_active")
            assert "active draft is 0" in reply.json["error"]["message"]
            await _serves(rig, 0)

    run(scenario())


def test_same_idempotency_key_gets_the_same_answer_and_one_swap(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            publish(tmp_path)
            first, second = await asyncio.gather(*(rig.activate(1, 0, key="k1") for _ in range(2)))
            third = await rig.activate(1, 0, key="k1")
            assert first.status == 200
            assert first.body == second.body == third.body
            assert rig.engine.calls.count("commit 1") == 1
            other = await rig.activate(1, 1, key="k1")
            assert (other.status, other.code) == (422, "idempotency_key_reused")
            refused = [await rig.activate(1, 7, key="k2") for _ in range(2)]
            assert [reply.status for reply in refused] == [409, 409]
            assert refused[0].body == refused[1].body

    run(scenario())


def test_second_concurrent_activation_is_refused_and_may_retry_with_its_key(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            publish(tmp_path)
            publish(tmp_path)
            rig.engine.stage_gate = gate = asyncio.Event()
            first = asyncio.create_task(rig.activate(1, 0))
            await eventually(lambda: "stage 1" in rig.engine.calls)
            second = await rig.activate(2, 0, key="later")
            assert (second.status, second.code) == (409, "swap_in_progress")
            gate.set()
            assert (await first).status == 200
            assert (await rig.activate(2, 0, key="later")).code == "stale_expected_active"

    run(scenario())


def test_one_engine_refusing_to_stage_leaves_all_as_they_were(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, num_engines=2) as rig:
            for refusing in rig.engines:
                version = publish(tmp_path)
                refusing.refuse_stage[version] = "tensor fc.weight is [3, 3], expected [8, 24]"
                reply = await rig.activate(version, 0)
                assert (reply.status, reply.code) == (422, "bad_artifact")
                assert "fc.weight" in reply.json["error"]["message"]
                assert not [call for engine in rig.engines for call in engine.calls if call.startswith("commit")]
                await _serves(rig, 0)

    run(scenario())


def test_one_engine_refusing_to_commit_sends_the_other_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, num_engines=2) as rig:
            publish(tmp_path)
            rig.engines[1].refuse_commit[1] = "worker is out of memory"
            reply = await rig.activate(1, 0)
            assert reply.status == 409
            assert "out of memory" in reply.json["error"]["message"]
            assert rig.engines[0].calls[-3:] == ["commit 1", "stage 0", "commit 0"]
            await _serves(rig, 0)
            assert (await rig.status())["swaps"][-1]["outcome"] == "reverted"
            rig.engines[1].refuse_commit.clear()
            await eventually(lambda: len(rig.gateway.fleet.ready()) == 2)
            await eventually(lambda: not rig.gateway.swap.is_busy)
            assert (await rig.activate(1, 0)).status == 200
            await _serves(rig, 1)

    run(scenario())


def test_engine_dying_in_a_commit_sends_the_other_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        settings = {"swap_deadline_s": 0.2}
        async with running(tmp_path, num_engines=2, settings=settings) as rig:
            publish(tmp_path)
            rig.engines[1].hang_commit = True
            activation = asyncio.create_task(rig.activate(1, 0))
            await eventually(lambda: "commit 1" in rig.engines[1].calls)
            await rig.engines[1].stop()
            reply = await activation
            assert (reply.status, reply.code) == (409, "commit_failed")
            assert rig.engines[0].draft_version == 0
            assert (await rig.complete()).status == 200

    run(scenario())


def _truncate(state_dir: Path, version: int) -> None:
    path = DraftStore(state_dir).directory(version) / WEIGHTS_FILE
    path.write_bytes(path.read_bytes()[:-1])


def _drop_manifest(state_dir: Path, version: int) -> None:
    (DraftStore(state_dir).directory(version) / "manifest.json").write_text("{}")


def test_damaged_artifact_is_refused_before_any_engine_sees_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            for spoil, word in ((_truncate, "checksum"), (_drop_manifest, "manifest")):
                version = publish(tmp_path)
                spoil(tmp_path, version)
                reply = await rig.activate(version, 0, force=True)
                assert (reply.status, reply.code) == (422, "bad_artifact")
                assert word in reply.json["error"]["message"]
                assert set(rig.engine.calls) == {"status"}
                await _serves(rig, 0)

    run(scenario())


@pytest.mark.parametrize("name", [MANIFEST_FILE, WEIGHTS_FILE, CONFIG_FILE])
def test_a_pipe_where_a_file_belongs_is_refused_and_swaps_go_on(tmp_path: Path, name: str) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            bad, good = publish(tmp_path), publish(tmp_path)
            path = DraftStore(tmp_path).directory(bad) / name
            path.unlink()
            os.mkfifo(path)
            refused = await rig.activate(bad, 0)
            assert (refused.status, refused.code) == (422, "bad_artifact")
            assert name in refused.json["error"]["message"]
            assert (await rig.activate(good, 0)).status == 200

    run(scenario())


def test_a_disk_that_does_not_answer_holds_no_swap_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "DEADLINE_S", 0.2)

    async def scenario() -> None:
        async with running(tmp_path) as rig:
            stuck, good = publish(tmp_path), publish(tmp_path)
            verify, answers = rig.gateway.drafts.store.verify, threading.Event()

            def slow(version: int) -> DraftManifest:
                if version == stuck:
                    answers.wait()
                return verify(version)

            monkeypatch.setattr(rig.gateway.drafts.store, "verify", slow)
            for attempt in range(disk.MAX_WAITING):
                refused = await rig.activate(stuck, 0, key="once")
                assert (refused.status, refused.code) == (503, "disk_stuck")
                if attempt == 0:
                    assert (await rig.activate(good, 0)).status == 200
                    assert (await rig.activate(0, good, force=True)).status == 200
            assert (await rig.activate(good, 0)).code == "disk_stuck"
            listing = await rig.admin("GET", "/admin/drafts")
            assert (listing.status, listing.code, listing.headers["Retry-After"]) == (503, "disk_stuck", "1")
            answers.set()

            async def is_swapped() -> bool:
                return (await rig.activate(stuck, 0, key="once")).status == 200

            await eventually(is_swapped)

    run(scenario())


def test_no_request_waits_for_the_disk_on_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            store = rig.gateway.drafts.store
            floor, readers = store.floor, []

            def noted() -> int | None:
                readers.append(threading.current_thread())
                return floor()

            monkeypatch.setattr(store, "floor", noted)
            store.set_floor(0)
            version = publish(tmp_path, parent=0)
            assert (await rig.activate(version, 0)).status == 200
            assert (await rig.status())["active_version"] == version
            assert (await rig.admin("GET", "/admin/drafts")).json["floor_version"] == 0
            assert (await rig.status())["floor_version"] == 0
            assert (await rig.admin("POST", "/admin/drafts/rollback")).status == 200
            assert readers
            assert threading.main_thread() not in readers

    run(scenario())


def test_draft_of_another_target_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            publish(tmp_path, spec=msgspec.structs.replace(SPEC, target_revision="f" * 16))
            reply = await rig.activate(1, 0, force=True)
            assert (reply.status, reply.code) == (422, "spec_mismatch")
            assert "target_revision" in reply.json["error"]["message"]
            await _serves(rig, 0)

    run(scenario())


def test_draft_the_engine_refuses_is_refused_with_its_reason(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            for reason in ("tensor midlayer.q_proj holds NaN", "tensor fc.weight has the wrong shape"):
                version = publish(tmp_path)
                rig.engine.refuse_stage[version] = reason
                reply = await rig.activate(version, 0, force=True)
                assert reply.status == 422
                assert reason in reply.json["error"]["message"]
                assert reason in (await rig.status())["swaps"][-1]["reason"]
                await _serves(rig, 0)

    run(scenario())


PATH_TRICKS = ["..%2F..%2Fetc", "%2e%2e", "%31%2F..%2F2", "active", "%00", "1%20"]
NO_VERSIONS = ["-1", "1.0", "1e3", "0x1", "01", "%D9%A1", "9" * 40, "9" * 15]


def test_version_that_is_no_plain_number_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            headers = {"Authorization": f"Bearer {OPERATOR_TOKEN}"}
            for version in PATH_TRICKS + NO_VERSIONS:
                url = f"{rig.admin_url}/admin/drafts/{version}"
                for method, address in (("POST", f"{url}/activate"), ("GET", url)):
                    body = {"expected_active": 0}
                    async with rig.session.request(method, URL(address, encoded=True), json=body, headers=headers) as reply:
                        assert reply.status in (400, 404), version
                        assert (await reply.json())["error"]["message"]
            assert set(rig.engine.calls) == {"status"}

    run(scenario())


def test_ungated_or_rejected_draft_needs_force(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            for gate in (None, REJECTED):
                version = publish(tmp_path, gate=gate)
                active = rig.engine.draft_version
                reply = await rig.activate(version, active)
                assert (reply.status, reply.code) == (409, "draft_not_accepted")
                assert "force" in reply.json["error"]["message"]
                assert (await rig.activate(version, active, force=True)).status == 200

    run(scenario())


def test_pointer_that_cannot_be_written_does_not_stop_the_swap(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            publish(tmp_path)
            link = DraftStore(tmp_path).active_link
            link.unlink()
            link.mkdir()  # A rename over a directory fails, as it would on a full disk.
            reply = await rig.activate(1, 0)
            assert (reply.status, reply.json["persisted"]) == (200, False)
            assert "pointer" in reply.json["reason"]
            assert rig.engine.draft_version == 1
            assert (await rig.status())["active_version"] == 1

    run(scenario())


def test_swap_without_a_ready_engine_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            publish(tmp_path)
            await rig.engine.stop()
            await eventually(lambda: not rig.gateway.fleet.ready())
            reply = await rig.activate(1, 0)
            assert (reply.status, reply.code, reply.headers["Retry-After"]) == (503, "no_engine_ready", "1")

    run(scenario())


def test_drafts_are_listed_and_shown(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            publish(tmp_path, parent=0)
            _drop_manifest(tmp_path, publish(tmp_path))
            await rig.activate(1, 0)
            drafts = msgspec.json.decode((await rig.admin("GET", "/admin/drafts")).body, type=DraftList)
            assert [draft.marks for draft in drafts.drafts] == [["previous", "floor"], ["active"], ["unreadable"]]
            shown = msgspec.json.decode((await rig.admin("GET", "/admin/drafts/1")).body, type=DraftEntry)
            assert shown.manifest is not None
            assert shown.manifest.parent == 0
            missing = await rig.admin("GET", "/admin/drafts/77")
            assert (missing.status, missing.code) == (404, "draft_not_found")
            assert (await rig.activate(77, 1)).status == 404

    run(scenario())


def test_garbage_activation_bodies_are_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            extra = b'{"expected_active": 0, "path": "/etc"}'
            for body in (b"", b"{", b"[]", b"\xff", b'{"expected_active": "0"}', extra):
                reply = await rig.admin("POST", "/admin/drafts/0/activate", data=body)
                assert (reply.status, reply.code) == (400, "bad_body")

    run(scenario())
