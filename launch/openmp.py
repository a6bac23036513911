"""What LLVM's OpenMP leaves of a process that is killed: `__kmp_register_library_startup` in openmp/runtime/src/kmp_runtime.cpp."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

_SHARED_MEMORY = Path("/dev/shm")


def group_members(group: int) -> set[int]:
    """Processes that belong to a process group now, those that nobody has waited for included."""
    return {pid for pid in psutil.pids() if _group_of(pid) == group}


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except (ProcessLookupError, PermissionError):
        return None


def remove_marks(pids: Iterable[int]) -> None:
    """Remove the shared memory, a page of memory each, by which these processes of this user told that they have OpenMP loaded."""
    for pid in pids:
        with suppress(OSError):
            (_SHARED_MEMORY / f"__KMP_REGISTERED_LIB_{pid}_{os.getuid()}").unlink()
