"""Virtual environments of their own for programs that are measured beside ours, made on demand under PACELINE_HOME."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from loadtest.processes import SystemUnderTestError
from wire.environment import paceline_home

_INSTALL_DEADLINE_S = 1800.0


def environment_dir(name: str) -> Path:
    """Where the environment of that name is; the name tells the version of what is in it."""
    return (paceline_home() / "venvs" / name).absolute()


def ensure_installed(name: str, pip_words: Sequence[str]) -> Path:
    """Its Python; it is made first where it is absent, by `pip install` and these words.

    Raises SystemUnderTestError with pip's reason.
    """
    directory = environment_dir(name)
    python, mark = directory / "bin" / "python", directory / "installed"
    if mark.is_file():
        return python
    for argv in (
        [sys.executable, "-m", "venv", "--clear", str(directory)],
        [str(python), "-m", "pip", "install", *pip_words],
    ):
        try:
            answer = subprocess.run(argv, capture_output=True, text=True, timeout=_INSTALL_DEADLINE_S)
        except subprocess.TimeoutExpired as error:
            raise SystemUnderTestError(f"{' '.join(argv)} did not end within {_INSTALL_DEADLINE_S:.0f} s") from error
        if answer.returncode:
            raise SystemUnderTestError(f"{' '.join(argv)} ended with code {answer.returncode}: {answer.stderr[-1000:]}")
    mark.touch()
    return python
