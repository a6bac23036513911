"""What a measurement tells of the machine it was made on."""

from __future__ import annotations

import os
import platform


def machine() -> dict[str, str | int]:
    """Operating system, Python, and the number of cores this process may use."""
    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        "num_cores": len(os.sched_getaffinity(0)),
    }
