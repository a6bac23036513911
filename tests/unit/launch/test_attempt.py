from __future__ import annotations

from pathlib import Path

import pytest

from launch.attempt import Attempt
from launch.rundir import RunDir


def test_a_write_below_a_regular_file_is_told_once_until_it_succeeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / "state"
    run_dir, attempt = RunDir(state), Attempt()
    state.write_text("a file where the directory was")

    def write() -> None:
        run_dir.write_system({"pid": 1})

    assert not attempt("write system.json", write)
    assert not attempt("write system.json", write)
    assert capsys.readouterr().err.count("cannot write system.json") == 1
    state.unlink()
    run_dir.create()
    assert attempt("write system.json", write)
    assert capsys.readouterr().err == ""
    run_dir.system_file.unlink()
    run_dir.run.rmdir()
    assert not attempt("write system.json", write)
    assert "going on without" in capsys.readouterr().err


def test_other_errors_are_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        Attempt()("divide", lambda: 1 / 0)


def test_a_full_stderr_is_borne(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    full = open("/dev/full", "w")  # noqa: SIM115
    monkeypatch.setattr("sys.stderr", full)
    assert not Attempt()("look", (tmp_path / "absent").read_text)
