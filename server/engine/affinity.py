"""Threads of ours stay off the cores that compute.

vLLM binds a CPU worker to its compute cores, and every thread made afterwards inherits that mask.
"""

from __future__ import annotations

import os
import threading


def leave_compute_cores() -> None:
    """Let the calling thread run on any core this machine grants; the kernel intersects with the cpuset."""
    os.sched_setaffinity(threading.get_native_id(), range(os.cpu_count() or 1))
