"""One process at a time."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from wire.lock_file import is_locked, take_lock


def test_a_lock_is_held_until_its_descriptor_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not is_locked(path)
    assert not path.exists(), "asking creates nothing"
    handle = take_lock(path)
    assert handle is not None
    assert is_locked(path)
    assert take_lock(path) is None
    os.close(handle)
    assert not is_locked(path)


def test_a_killed_process_gives_its_lock_back(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    code = "import sys, pathlib; from wire.lock_file import take_lock; take_lock(pathlib.Path(sys.argv[1])); print(1, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"1\n"
        assert take_lock(path) is None
        holder.kill()
        holder.wait()
    assert take_lock(path) is not None


def test_who_asks_does_not_look_like_a_holder_to_who_else_asks(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    with path.open() as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)
        assert not is_locked(path)


def test_a_lock_without_its_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        take_lock(tmp_path / "missing" / "lock")
