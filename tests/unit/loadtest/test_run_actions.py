"""What a scenario does to a system: through its admin API, at its times, and what is kept of it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from run_rig import Left, Server, phase, run, scenario
from waiting import DEADLINE_S

from loadtest.client import new_session
from loadtest.run import actions
from loadtest.run.target import Target, TargetError, find

LANE = {"phase": [phase({"kind": "poisson", "rate_per_s": 5}, 1.5)]}


class AdminPort:
    """Remembers what it was asked; the drafts are those of the test."""

    def __init__(self, *versions: int, active: int = 5, unreadable: int | None = None) -> None:
        self.calls: list[tuple[str, Any]] = []
        self._drafts = [
            {"version": version, "marks": ["unreadable"] if version == unreadable else []} for version in (*versions, active)
        ]
        self._active = active

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/admin/drafts", self._list), web.post("/admin/{rest:.*}", self._take)]

    async def _list(self, _request: web.Request) -> web.Response:
        named = {"active_version": self._active, "previous_version": None, "floor_version": 0}
        return web.json_response({**named, "drafts": self._drafts})

    async def _take(self, request: web.Request) -> web.Response:
        self.calls.append((request.path, await request.json()))
        if "no-such" in request.path:
            return web.json_response({"error": {"message": "there is no engine 'no-such'"}}, status=404)
        return web.json_response({})


def acted(tmp_path: Path, port: AdminPort, *wanted: dict[str, Any], system_file: Path | None = None) -> Left:
    return run(scenario(LANE, action=list(wanted)), Server(), tmp_path / "run", *port.routes(), system_file=system_file)


def test_actions_go_to_the_admin_api_at_their_times(tmp_path: Path) -> None:
    port = AdminPort()
    left = acted(
        tmp_path,
        port,
        {"at_s": 0.2, "do": "pause_learner"},
        {"at_s": 0.5, "do": "drain", "process": "engine-0"},
        {"at_s": 0.8, "do": "undrain", "process": "engine-0"},
        {"at_s": 1.0, "do": "rollback"},
        {"at_s": 1.2, "do": "resume_learner"},
    )
    assert [path for path, _ in port.calls] == [
        "/admin/learner/pause",
        "/admin/engines/engine-0/drain",
        "/admin/engines/engine-0/undrain",
        "/admin/drafts/rollback",
        "/admin/learner/resume",
    ]
    assert [(one.do, one.process, one.problem) for one in left.run.actions][:2] == [
        ("pause_learner", "", None),
        ("drain", "engine-0", None),
    ]
    for one, wanted_s in zip(left.run.actions, (0.2, 0.5, 0.8, 1.0, 1.2), strict=True):
        assert wanted_s <= one.at_s <= one.ended_at_s


def test_a_swap_activates_the_newest_other_draft_that_can_be_read(tmp_path: Path) -> None:
    port = AdminPort(3, 4, 7, unreadable=7)
    acted(tmp_path, port, {"at_s": 0.1, "do": "swap"})
    assert port.calls == [("/admin/drafts/4/activate", {"expected_active": 5, "force": True})]


def test_an_action_that_repeats_ends_with_the_run(tmp_path: Path) -> None:
    port = AdminPort(4)
    left = acted(tmp_path, port, {"at_s": 0.1, "do": "swap", "every_s": 0.5})
    assert 2 <= len(port.calls) <= 3
    assert len(left.run.actions) == len(port.calls)


def test_an_action_that_fails_is_kept_and_the_run_goes_on(tmp_path: Path) -> None:
    left = acted(tmp_path, AdminPort(), {"at_s": 0.1, "do": "swap"}, {"at_s": 0.2, "do": "drain", "process": "no-such"})
    assert "no draft to swap to" in (left.run.actions[0].problem or "")
    assert "there is no engine 'no-such'" in (left.run.actions[1].problem or "")
    assert left.run.is_valid


def test_a_kill_is_a_kill(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        system_file = tmp_path / "system.json"
        system_file.write_text(json.dumps({"processes": {"engine-0": {"pid": process.pid}}}))
        left = acted(tmp_path, AdminPort(), {"at_s": 0.1, "do": "kill", "process": "engine-0"}, system_file=system_file)
        assert process.wait(DEADLINE_S) == -9
    assert left.run.actions[0].problem is None


def test_what_the_target_cannot_do_is_said_before_the_run(tmp_path: Path) -> None:
    target = Target(url="http://127.0.0.1:9", model="m")
    with pytest.raises(TargetError, match="admin API"):
        actions.check(scenario(LANE, action=[{"at_s": 0, "do": "swap"}]), target)
    with pytest.raises(TargetError, match=r"kills \['engine-7'\]"):
        actions.check(scenario(LANE, action=[{"at_s": 0, "do": "kill", "process": "engine-7"}]), target)
    actions.check(scenario(LANE), target)


def found(state_dir: Path, **options: Any) -> Target:
    async def look() -> Target:
        async with new_session(1) as session:
            given: dict[str, Any] = {"url": None, "admin_url": None, "model": "m"}
            return await find(session, state_dir=state_dir, **{**given, **options})

    return asyncio.run(look())


def test_the_target_is_the_local_system_or_the_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_OPERATOR_TOKEN", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    with pytest.raises(TargetError, match="no system runs from"):
        found(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "operator.token").write_text("secret\n")
    description = {"gateway_url": "http://127.0.0.1:1", "admin_url": "http://127.0.0.1:2", "processes": {"gateway": {"pid": 3}}}
    (tmp_path / "run" / "system.json").write_text(json.dumps(description))
    for local in (found(tmp_path), found(tmp_path, url="http://127.0.0.1:1/v1/")):
        assert (local.url, local.process_ids()) == ("http://127.0.0.1:1", {"gateway": 3})
        assert local.admin is not None
        assert (local.admin.url, local.admin.token) == ("http://127.0.0.1:2", "secret")
    other = found(tmp_path, url="https://elsewhere/v1")
    assert (other.url, other.admin, other.process_ids()) == ("https://elsewhere", None, {})
    assert other.headers == {"Authorization": "Bearer key"}
    monkeypatch.setenv("PACELINE_OPERATOR_TOKEN", "theirs")
    remote = found(tmp_path, url="https://elsewhere", admin_url="https://elsewhere:2/")
    assert remote.admin is not None
    assert (remote.admin.url, remote.admin.token) == ("https://elsewhere:2", "theirs")


def test_a_url_that_lists_no_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="names no model"):
        found(tmp_path, url="http://127.0.0.1:9", model=None)
