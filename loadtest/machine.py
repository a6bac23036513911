"""What a measurement tells of the machine it was made on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

_PROCESSORS = Path("/proc/cpuinfo")


def machine() -> dict[str, str | int]:
    """Operating system, Python, processor, and the number of its cores that this process may use."""
    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        "processor": _processor(),
        "num_cores": len(os.sched_getaffinity(0)),
    }


def _processor() -> str:
    """The model's name where Linux tells it, else the architecture."""
    try:
        lines = _PROCESSORS.read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
