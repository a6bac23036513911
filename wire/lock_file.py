"""Lock files: what one process at a time may do. The kernel gives a lock back with its holder's end, however that came."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def take_lock(path: Path) -> int | None:
    """A descriptor that holds the lock until it is closed; None where another process has it. Raises OSError without its directory."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def is_locked(path: Path) -> bool:
    """Whether a process has it; asking creates nothing."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)  # others may ask at the same time
    except OSError:
        return True
    finally:
        os.close(handle)
    return False
