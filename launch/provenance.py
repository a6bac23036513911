"""Provenance: what ran. Written beside every run so that a number can be traced to code, versions and settings."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from launch.config import SystemConfig
from launch.host import CPU_DISTRIBUTION, CUDA_DISTRIBUTION, distribution_version

_DISTRIBUTIONS = ("paceline", CPU_DISTRIBUTION, CUDA_DISTRIBUTION, "torch", "transformers", "safetensors", "pyzmq", "fastapi")


def versions() -> dict[str, str]:
    """Versions of the distributions that decide behaviour, as far as they are installed."""
    found = {name: distribution_version(name) for name in _DISTRIBUTIONS}
    return {name: version for name, version in found.items() if version}


def git_revision() -> str | None:
    """Commit of the source tree, with `-dirty-` and a digest of the difference where files of it were changed; None outside a checkout.

    Two states of one tree so never go by one name. Files that git does not know are left out.
    """
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():  # installed: git would tell the commit of whatever checkout lies around it
        return None
    try:
        commit = _git(root, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*").decode().strip()
        if commit.endswith("-dirty"):
            commit = f"{commit}-{hashlib.sha256(_git(root, 'diff', 'HEAD', '--binary', '--no-ext-diff')).hexdigest()[:8]}"
    except (OSError, subprocess.SubprocessError):
        return None
    return commit or None


def _git(root: Path, *words: str) -> bytes:
    return subprocess.run(["git", *words], cwd=root, capture_output=True, timeout=10, check=True).stdout


def describe(config: SystemConfig) -> dict[str, Any]:
    """Everything needed to run the same again."""
    return {
        "started_at_s": time.time(),
        "argv": sys.argv,
        "git_revision": git_revision(),
        "versions": versions(),
        "python": platform.python_version(),
        "machine": {"system": platform.platform(), "num_cores": len(os.sched_getaffinity(0))},
        "config": config.model_dump(mode="json"),
    }


def write(path: Path, config: SystemConfig) -> None:
    path.write_text(json.dumps(describe(config), indent=2) + "\n")
