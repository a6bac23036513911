"""A system in the background: start `paceline up` in a session of its own and wait until it is ready."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

from launch import logs
from launch.config import SystemConfig
from launch.progress import Waiting
from launch.rundir import LaunchError, RunDir
from launch.stages import stage
from launch.up import start_detached

_POLL_S = 0.5


def start_and_wait(config: SystemConfig, arguments: list[str], report: Callable[[str], None]) -> dict[str, Any]:
    """Start a system in the background; returns its `system.json` once it is ready. Raises LaunchError.

    An interrupt while it starts stops it again.
    """
    run_dir = RunDir(config.state.directory)
    if run_dir.is_locked():
        raise LaunchError(f"a system already runs from {run_dir.state}; stop it with `paceline down`")
    run_dir.system_file.unlink(missing_ok=True)
    process = start_detached(arguments, run_dir.state)
    try:
        with Waiting("starting") as waiting:
            system = _wait_ready(run_dir, process, waiting)
    except BaseException:
        if process.poll() is None:
            process.terminate()
            process.wait()
        raise
    report(f"ready: {system['gateway_url']}/v1, live page {system['admin_url']}/ui, logs {run_dir.logs}")
    return system


def _wait_ready(run_dir: RunDir, process: subprocess.Popen[bytes], waiting: Waiting) -> dict[str, Any]:
    log = run_dir.log_file("up")
    while True:
        if process.poll() == 128 + signal.SIGTERM:
            raise LaunchError("the system was stopped while it started")
        if process.poll() is not None:
            raise LaunchError("the system did not start:\n" + "\n".join(logs.tail(log, 40)))
        system = run_dir.read_system() if run_dir.system_file.is_file() else {}
        if system.get("is_ready"):
            return system
        waiting.say(what_it_waits_for(system, logs.tail(log, 1), run_dir))
        time.sleep(_POLL_S)


def what_it_waits_for(system: dict[str, Any], last_lines: list[str], run_dir: RunDir) -> str:
    """A sentence for the person who waits."""
    processes = system.get("processes", {})
    started = [name for name, process in processes.items() if process["pid"] is not None]
    if any(processes[name]["role"] == "gateway" for name in started):
        return "waiting for the gateway to reach every engine"
    engines = [name for name in started if processes[name]["role"] == "engine"]
    if engines:
        return "; ".join(f"{name} {stage(run_dir.log_file(name))}" for name in engines)
    return last_lines[-1] if last_lines else "starting"
