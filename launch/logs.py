"""Log files of roles: rotated at every start, and quoted when a start fails."""

from __future__ import annotations

import shutil
from pathlib import Path

KEPT_LOGS = 3
_TAIL_BYTES = 64 * 1024
_SOME_BYTES = 1024 * 1024
"""Less than this, and a process that starts cannot write what it must."""


def rotate(path: Path, kept: int = KEPT_LOGS) -> None:
    """Move `x.log` to `x.log.1`, `x.log.1` to `x.log.2` and so on; the oldest goes."""
    for number in range(kept - 1, 0, -1):
        older = path.with_name(f"{path.name}.{number}")
        newer = path if number == 1 else path.with_name(f"{path.name}.{number - 1}")
        if newer.exists():
            newer.replace(older)


def tail(path: Path, num_lines: int = 25) -> list[str]:
    """The last lines of a log; empty where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(file.tell() - _TAIL_BYTES, 0))
            return file.read().decode(errors="replace").splitlines()[-num_lines:]
    except OSError:
        return []


_HINTS = {
    "address already in use": "another process holds the port: choose a free one with --set, or 0 to let the system choose",
    "unrecognized arguments": "an option in [engine] is not one of `vllm serve`: compare with `vllm serve --help=all`",
    "error: argument": "a value in [engine] is not accepted by `vllm serve`: see the line above",
    "out of memory": "too little memory: lower engine.kv_cache_memory_bytes or engine.max_num_seqs",
    "cannot allocate memory": "too little memory: lower engine.kv_cache_memory_bytes or engine.max_num_seqs",
    "no available memory for the cache blocks": "raise engine.kv_cache_memory_bytes or lower engine.max_model_len",
    "modulenotfounderror": "a package is missing: run `make setup`, then `paceline doctor`",
    "no space left on device": "the disk is full",
}


def hint(lines: list[str]) -> str | None:
    """What to do about a failure, guessed from its last log lines."""
    text = "\n".join(lines).lower()
    return next((advice for mark, advice in _HINTS.items() if mark in text), None)


def disk_hint(path: Path) -> str | None:
    """What to do where a log could not be written, so that it tells nothing of the failure."""
    try:
        num_free = shutil.disk_usage(path.parent).free
    except OSError as error:
        return f"{path.parent} cannot be used: {error}"
    return f"the disk of {path.parent} is full: free some of it" if num_free < _SOME_BYTES else None
