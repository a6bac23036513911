from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from launch import logs


def test_the_last_three_logs_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    for number in range(5):
        logs.rotate(path)
        path.write_text(str(number))
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"a.log": "4", "a.log.1": "3", "a.log.2": "2"}


def test_the_tail_is_the_last_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("\n".join(str(number) for number in range(50_000)))
    assert logs.tail(path, 2) == ["49998", "49999"]
    assert logs.tail(tmp_path / "absent.log") == []


def test_a_hint_is_given_where_the_log_speaks_of_a_known_trouble() -> None:
    assert "choose a free one" in (logs.hint(["OSError: [Errno 98] Address already in use"]) or "")
    assert "vllm serve --help" in (logs.hint(["vllm: error: unrecognized arguments: --no-such"]) or "")
    assert logs.hint(["all is well"]) is None


def test_a_full_disk_is_told_where_the_log_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert logs.disk_hint(tmp_path / "engine.log") is None
    usage = type(shutil.disk_usage(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(total=10**9, used=10**9 - 4096, free=4096))
    assert f"the disk of {tmp_path} is full" in (logs.disk_hint(tmp_path / "engine.log") or "")
    monkeypatch.undo()
    assert "cannot be used" in (logs.disk_hint(tmp_path / "gone" / "engine.log") or "")
