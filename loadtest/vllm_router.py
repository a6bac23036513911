"""vllm-router, the router of the vLLM project, as a baseline: installed on demand into a virtual environment of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from loadtest import environments
from loadtest.processes import running_process
from wire.ports import free_ports

VERSION = "0.1.17"
_NAME = f"vllm-router-{VERSION}"
_REQUIREMENTS = (f"vllm-router=={VERSION}",)
_DEADLINE_S = 60.0


def environment_dir() -> Path:
    """Where it is installed."""
    return environments.environment_dir(_NAME)


def ensure_installed() -> Path:
    """Its Python, installed first where it is absent; raises SystemUnderTestError with pip's reason."""
    return environments.ensure_installed(_NAME, _REQUIREMENTS)


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
