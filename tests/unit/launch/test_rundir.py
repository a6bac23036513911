from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from launch.rundir import MAX_SOCKET_PATH_BYTES, LaunchError, RunDir, make_tokens, socket_dir, write_private


def test_short_state_directories_hold_their_own_sockets(tmp_path: Path) -> None:
    assert socket_dir(Path("/state/run"), tmp_path) == Path("/state/run")


def test_sockets_of_a_long_state_directory_move_to_a_short_one() -> None:
    run = Path("/" + "very-long-name/" * 10) / "run"
    moved = socket_dir(run, Path("/tmp"))
    assert len(str(moved / f"{'x' * 24}.sock")) <= MAX_SOCKET_PATH_BYTES
    assert moved == socket_dir(run, Path("/tmp"))
    assert moved != socket_dir(run / "other", Path("/tmp"))


def test_given_tokens_are_kept_and_missing_ones_are_made() -> None:
    tokens = make_tokens({"PACELINE_OPERATOR_TOKEN": "given"})
    assert tokens.operator == "given"
    assert len(tokens.engine) >= 32
    assert "given" not in repr(tokens)


def test_secrets_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("old")
    path.chmod(0o644)
    write_private(path, "new")
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_second_system_on_one_state_directory_is_refused(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.create()
    script = (
        "import sys; from pathlib import Path; from launch.rundir import RunDir\n"
        f"lock = RunDir(Path({str(tmp_path)!r})).lock(); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert run_dir.is_locked()
        with pytest.raises(LaunchError, match="a system already runs from"):
            run_dir.lock()
        holder.kill()
    assert not run_dir.is_locked()
    run_dir.lock()


def test_without_a_system_the_error_says_how_to_start_one(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="paceline up"):
        RunDir(tmp_path).read_system()
