from __future__ import annotations

import re

import pytest

from launch import progress


def test_where_there_is_no_terminal_a_sentence_is_said_once_and_then_only_the_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_PLAIN_EVERY_S", 0.0)
    with progress.Waiting("starting") as waiting:
        for sentence in ("compiles", "compiles", "compiles", "loads", "compiles"):
            waiting.say(sentence)
    lines = [re.sub(r"\d+ s", "N s", line) for line in capsys.readouterr().out.splitlines()]
    assert lines == ["compiles (N s)", "... N s", "... N s", "loads (N s)", "compiles (N s)"]
