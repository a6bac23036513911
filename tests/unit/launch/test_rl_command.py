"""`paceline rl` before it imports anything heavy: what it refuses to begin, and which system it joins."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from launch import rl
from launch.cli import main
from launch.config import SystemConfig
from launch.rundir import LaunchError, RunDir

ENVIRONMENT = '\n[[environment]]\nname = "sums"\nkind = "addition"\n'


def write_config(directory: Path, text: str) -> Path:
    path = directory / "run.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[rollouts]\nenabled = true\n", "there is no [[environment]]"),
        (ENVIRONMENT, "rollouts.enabled is false"),
        ("[rl]\nnum_stepps = 3\n" + ENVIRONMENT, "did you mean rl.num_steps"),
        ('[[environment]]\nname = "a"\nkind = "reasoning"\n', "reasoning_gym"),
    ],
)
def test_a_run_that_cannot_be_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    config = write_config(tmp_path, text)
    assert main(["rl", "run", str(config), "--set", f"state.dir={tmp_path / 'state'}"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "state").exists()


def test_why_of_no_run_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rl", "why", "--set", f"state.dir={tmp_path}"]) == 2
    assert "no run called 'run'" in capsys.readouterr().err


def running(tmp_path: Path, *overrides: str, is_ready: bool = True) -> tuple[RunDir, SystemConfig]:
    """What a system leaves for others to find, with these settings."""
    config = SystemConfig.load([], [f"state.dir={tmp_path}", *overrides])
    run_dir = RunDir(config.state.directory)
    run_dir.create()
    run_dir.role_file("system-config").write_text(config.model_dump_json())
    system = {
        "pid": os.getpid(),
        "pid_created_at_s": 1.0,
        "gateway_url": "http://g",
        "admin_url": "http://a",
        "is_ready": is_ready,
    }
    run_dir.system_file.write_text(json.dumps(system))
    return run_dir, config


def test_a_system_of_other_arithmetic_is_not_joined(tmp_path: Path) -> None:
    run_dir, config = running(tmp_path, "rollouts.enabled=true")
    assert rl._served(run_dir, config) == config
    wanted = SystemConfig.load([], [f"state.dir={tmp_path}", "rollouts.enabled=true", "target.dtype=float32"])
    with pytest.raises(LaunchError, match=r"target\.dtype = 'bfloat16', this configuration 'float32'; stop it"):
        rl._served(run_dir, wanted)


def test_a_system_that_is_not_ready_is_waited_for_by_whoever_asks(tmp_path: Path) -> None:
    run_dir, config = running(tmp_path, is_ready=False)
    with pytest.raises(LaunchError, match="not ready yet"):
        rl._served(run_dir, config)


def test_the_trainer_computes_where_no_engine_does() -> None:
    assert rl.cores_left((0, 1, 2), {0}) == {1, 2}
    assert rl.cores_left((0, 1), {0, 1}) == set()
