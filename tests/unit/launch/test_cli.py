from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.cli import main
from launch.rundir import RunDir


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    return tmp_path


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    text = capsys.readouterr().out
    for command in ("up", "down", "demo", "serve", "learn", "draft", "model", "plan", "doctor", "view", "bench", "version"):
        assert f"\n    {command} " in text


def test_a_bad_setting_is_one_clear_message_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--set", "draft.depth=3"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("paceline: --set draft.depth=3 is not a valid SystemConfig:\n  draft.depth: ")


@pytest.mark.parametrize(
    ("setting", "meant"),
    [
        ("routing=kv_aware", "routing.policy"),
        ("gateway.prt=1", "gateway.port"),
        ("depth=auto", "depth.mode"),
        ("learner=false", "learner.enabled"),
    ],
)
def test_a_setting_that_is_nearly_right_is_told_what_was_meant(
    capsys: pytest.CaptureFixture[str], setting: str, meant: str
) -> None:
    assert main(["plan", "--set", setting]) == 2
    assert f"did you mean {meant}?" in capsys.readouterr().err


def test_a_configuration_file_without_its_option_is_told_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "configs/cpu.toml"])
    assert "--config configs/cpu.toml" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "run", "chat", "configs/cpu.toml"])
    assert "--config" not in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["up"], ["up", "--detach"]])
def test_a_state_directory_that_cannot_be_written_is_one_clear_message(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "in-the-way").write_text("")
    command = [sys.executable, "-m", "launch.cli", *arguments, "--set", f"state.dir={tmp_path}/in-the-way"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"{tmp_path}/in-the-way" in line
    assert "state.dir" in line


def test_a_demo_that_would_send_nothing_does_not_begin(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--concurrency", "0"]) == 2
    assert "give 1 or more" in capsys.readouterr().err


def test_plan_prints_json_without_secrets(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_OPERATOR_TOKEN", "very-secret-token")
    assert main(["plan", "--json"]) == 0
    text = capsys.readouterr().out
    assert "very-secret-token" not in text
    assert [spec["role"] for spec in json.loads(text)["processes"]] == ["engine", "learner", "gateway"]


def test_plan_writes_nothing(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan"]) == 0
    assert capsys.readouterr().out
    assert list(home.iterdir()) == []


def test_plan_works_from_any_directory_and_into_a_closed_pipe(tmp_path: Path) -> None:
    done = subprocess.run(
        f"set -o pipefail; {sys.executable} -m launch.cli plan | head -1",
        shell=True,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        executable="/bin/bash",
    )
    assert done.stdout.startswith("target")
    assert done.stderr == ""


def test_no_drafts_yet(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["draft", "list"]) == 0
    assert "paceline draft init" in capsys.readouterr().out


def test_down_without_a_system_has_nothing_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["down"]) == 0
    assert capsys.readouterr().out.startswith("nothing runs from ")


@pytest.mark.parametrize("content", ["{}", "[]", "null", '{"pid": "x"}', "{", '{"pid": -1, "pid_created_at_s": 0}'])
@pytest.mark.parametrize("arguments", [["down"], ["view"], ["draft", "activate", "3", "--expected-active", "0"]])
def test_a_spoilt_system_file_is_one_clear_message(
    arguments: list[str], content: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = RunDir(home / "state")
    run_dir.create()
    run_dir.operator_token_file.write_text("token")
    run_dir.system_file.write_text(content)
    lock = run_dir.lock()
    assert main([*arguments, "--set", f"state.dir={run_dir.state}"]) == 2
    os.close(lock)
    message = capsys.readouterr().err
    assert message.startswith("paceline: ")
    assert str(run_dir.state) in message


@pytest.mark.parametrize("arguments", [["draft", "rollback"], ["draft", "activate", "3"], ["view"], ["draft", "show", "3"]])
def test_without_a_system_a_command_says_so(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("paceline: ")


def test_doctor_reports_json_and_fails_where_the_model_is_absent(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--set", f"target.path={home}/absent"]) == 1
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
    assert checks["python"]["state"] == "ok"
    assert checks["model"]["state"] == "fail"
    assert checks["model"]["advice"]


def test_bars_can_be_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "bars", "--list", "--only", "P1"]) == 0
    assert "P1.al_heldout" in capsys.readouterr().out
