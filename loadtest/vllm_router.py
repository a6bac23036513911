"""vllm-router, the router of the vLLM project, as a baseline: installed on demand into a virtual environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from loadtest.processes import SystemUnderTestError, free_ports, running_process

VERSION = "0.1.17"
_REQUIREMENTS = (f"vllm-router=={VERSION}",)
_DEADLINE_S = 60.0
_INSTALL_DEADLINE_S = 600.0


def environment_dir() -> Path:
    """Where it is installed."""
    home = Path(os.environ.get("PACELINE_HOME") or Path.home() / ".cache" / "paceline")
    return home / "venvs" / f"vllm-router-{VERSION}"


def ensure_installed() -> Path:
    """Its Python, installed first where it is absent; raises SystemUnderTestError with pip's reason."""
    directory = environment_dir()
    python, mark = directory / "bin" / "python", directory / "installed"
    if mark.is_file():
        return python
    for argv in (
        [sys.executable, "-m", "venv", "--clear", str(directory)],
        [str(python), "-m", "pip", "install", *_REQUIREMENTS],
    ):
        answer = subprocess.run(argv, capture_output=True, text=True, timeout=_INSTALL_DEADLINE_S)
        if answer.returncode:
            raise SystemUnderTestError(f"{' '.join(argv)} ended with code {answer.returncode}: {answer.stderr[-1000:]}")
    mark.touch()
    return python


@asynccontextmanager
async def running_vllm_router(engine_urls: Sequence[str], *, cores: Collection[int] = ()) -> AsyncIterator[str]:
    """The router with its own defaults in front of these engines; yields its URL."""
    python = ensure_installed()
    port, metrics_port = free_ports(2)
    argv = [
        *(str(python), "-m", "vllm_router.launch_router", "--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-port", str(metrics_port), "--worker-urls", *engine_urls),
    ]
    url = f"http://127.0.0.1:{port}"
    async with running_process(argv, ready_url=f"{url}/v1/models", deadline_s=_DEADLINE_S, cores=cores):
        yield url
