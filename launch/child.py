"""Child: one process of the plan, in a session and process group of its own, with its log file."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import psutil

from launch import logs, openmp
from launch.attempt import Attempt
from launch.plan import STRIPPED_VARIABLES, ProcessSpec
from launch.watchdog import signal_group

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Ask the kernel to terminate this process when its parent dies. Runs between fork and exec."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def child_environment(base: Mapping[str, str], spec: ProcessSpec) -> dict[str, str]:
    """The caller's environment less what must not leak, plus the spec's own."""
    return {key: value for key, value in base.items() if key not in STRIPPED_VARIABLES} | spec.env


def open_log(path: Path, attempt: Attempt) -> IO[bytes]:
    """A fresh log, or /dev/null where none can be had: a process without a log serves, one that is not started does not."""
    attempt(f"make {path.parent}", lambda: path.parent.mkdir(parents=True, exist_ok=True))
    attempt(f"rotate {path}", lambda: logs.rotate(path))
    opened: list[IO[bytes]] = []
    if attempt(f"open {path}", lambda: opened.append(path.open("wb"))):
        return opened[0]
    return Path(os.devnull).open("wb")


class Child:
    """A started process. Owned by the supervisor's main thread: the kernel ties its life to that thread."""

    def __init__(self, spec: ProcessSpec, base_environment: Mapping[str, str], attempt: Attempt) -> None:
        self.spec = spec
        with open_log(spec.log_file, attempt) as log:
            self._process = self._spawn(log, base_environment)
        self.started_at_s = time.monotonic()
        self.exit_code: int | None = None
        self._members: set[int] = set()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def group(self) -> int:
        """The process group, led by the process itself."""
        return self._process.pid

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.started_at_s

    def is_running(self) -> bool:
        """Whether the process lives. Once it has ended, the rest of its group is killed too.

        The group is killed while its leader is still a zombie: the group id cannot belong to anyone else until then.
        """
        if self.exit_code is not None:
            return False
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return True
        self._end_group()
        return False

    def terminate(self) -> None:
        """Ask the process to end. It tells its own children."""
        if self.exit_code is None:
            self.note_members()
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End the whole group at once."""
        if self.exit_code is None:
            self._end_group()

    def note_members(self) -> None:
        """Remember who belongs to the group, for what they leave behind: once they have ended, nothing tells whose they were."""
        self._members |= openmp.group_members(self.group)

    def _end_group(self) -> None:
        """Kill what is left of the group, take the exit code, and clear up."""
        left = openmp.group_members(self.group) | {self.pid}
        signal_group(self.group, signal.SIGKILL)
        self.exit_code = self._process.wait()
        openmp.remove_marks(left | {pid for pid in self._members if not psutil.pid_exists(pid)})

    def _spawn(self, log: IO[bytes], base_environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        spec = self.spec

        def before_exec() -> None:
            die_with_parent()
            if spec.is_bound and spec.cores:
                os.sched_setaffinity(0, spec.cores)
            # Of the process alone: an engine computes all the time, and where the kernel shares the machine between sessions
            # (sched_autogroup, see sched(7)) a nice session beside it gets next to nothing. One session for all is no way either:
            # in it whoever yields its time is passed over, by seconds where engines wait for one another.
            os.nice(spec.nice)

        return subprocess.Popen(
            spec.argv,
            env=child_environment(base_environment, spec),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=before_exec,
        )
