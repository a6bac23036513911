"""Child: one process of the plan, in a process group of its own, with its log file."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import subprocess
import termios
import time
from collections.abc import Mapping
from contextlib import suppress
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


def leave_terminal() -> None:
    """Give up the terminal, as a session of its own would. Runs between fork and exec.

    With it, one process that reads or sets the terminal has the kernel stop its whole group, and nobody lets it go on.
    """
    with suppress(OSError):  # there is none, or it is closed
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            fcntl.ioctl(terminal, termios.TIOCNOTTY)
        finally:
            os.close(terminal)


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
            leave_terminal()
            if spec.is_bound and spec.cores:
                os.sched_setaffinity(0, spec.cores)
            os.nice(spec.nice)

        return subprocess.Popen(
            spec.argv,
            env=child_environment(base_environment, spec),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Where the kernel shares the machine between sessions (sched_autogroup, see sched(7)), processes of sessions of their
            # own get equal parts, whatever each needs: an engine that starts beside two loaded ones takes minutes. What gives
            # way has a session all the same: an engine's core spins, and beside it in one session a nice process gets next to nothing.
            process_group=None if spec.nice else 0,
            start_new_session=bool(spec.nice),
            preexec_fn=before_exec,
        )
