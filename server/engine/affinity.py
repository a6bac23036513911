"""Threads of ours stay off the cores that compute.

vLLM binds a CPU worker to its compute cores, and every thread made afterwards inherits that mask.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


def leave_compute_cores() -> None:
    """Let the calling thread run on any core this machine grants; the kernel intersects with the cpuset."""
    os.sched_setaffinity(threading.get_native_id(), range(os.cpu_count() or 1))


@contextmanager
def threads_off_compute_cores() -> Iterator[None]:
    """Threads made within may run anywhere; the calling thread then has the cores it had before, whatever was done to it."""
    mask = os.sched_getaffinity(0)
    leave_compute_cores()
    try:
        yield
    finally:
        os.sched_setaffinity(0, mask)
