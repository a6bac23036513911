"""Supervisor: starts the processes of a plan in order, keeps them running, and leaves nothing behind.

Single-threaded: `start` blocks until everything is ready, `tick` does one round of watching, `stop` ends all. Signals only
set a flag that the owner of the loop looks at.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch import logs
from launch.attempt import Attempt
from launch.child import Child
from launch.plan import ProcessSpec
from launch.probe import http_status, is_closed
from launch.rundir import LaunchError
from launch.stages import stage

_POLL_S = 0.2
_TELL_EVERY_S = 30.0
"""What an engine that starts does meanwhile."""
_HEALTHY_AFTER_S = 60.0
"""A process that lived this long starts again at the shortest backoff."""
_ALIVE_AFTER_S = 0.5
_LISTEN_EVERY_S = 1.0
CLOSED_FOR_S = 30.0
"""A process that takes no connections for so long is at its end and cannot reach it: it is killed and started again."""

Report = Callable[[str], None]


@dataclass
class Watched:
    """A process of the plan over its restarts."""

    spec: ProcessSpec
    child: Child | None = None
    num_restarts: int = 0
    num_quick_deaths: int = 0
    restart_at_s: float = 0.0
    last_exit_code: int | None = None
    look_at_s: float = 0.0
    """When to look again whether it listens."""
    given_up_at_s: float = 0.0
    """It must listen before that."""

    def describe(self) -> dict[str, Any]:
        """For `system.json`."""
        running = self.child is not None and self.child.exit_code is None
        return {
            "role": self.spec.role,
            "pid": self.child.pid if self.child is not None and running else None,
            "log_file": str(self.spec.log_file),
            "num_restarts": self.num_restarts,
            "last_exit_code": self.last_exit_code,
        }


def backoff_s(num_quick_deaths: int, max_s: float) -> float:
    """Wait before the next start: 1, 2, 4, ... seconds."""
    return float(min(2.0 ** min(num_quick_deaths, 16), max_s))


class Supervisor:
    """Owns every process of one system."""

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        *,
        base_environment: Mapping[str, str],
        grace_s: float,
        engine_token: str,
        report: Report,
        should_stop: Callable[[], bool],
        on_change: Callable[[], None] = lambda: None,
        before_start: Callable[[ProcessSpec], None] = lambda _spec: None,
    ) -> None:
        """`before_start` is called ahead of every start and restart of a process; it must not raise."""
        self.watched = [Watched(spec) for spec in specs]
        self.is_ready = False
        """Whether all that is required has been ready once; what ends afterwards is started again."""
        self._base_environment = dict(base_environment)
        self._grace_s = grace_s
        self._engine_token = engine_token
        self._tell = report
        self._should_stop = should_stop
        self._on_change = on_change
        self._before_start = before_start
        self._attempt = Attempt()
        self._watchdog = subprocess.Popen(
            [sys.executable, "-m", "launch.watchdog", str(grace_s)],
            stdin=subprocess.PIPE,
            bufsize=0,  # or closing the pipe would raise, too, once it is broken
            start_new_session=True,
        )

    def start(self) -> None:
        """Start all in order, each when those before it are ready; raises LaunchError with the log's last lines.

        Processes of one role start side by side. An optional process that fails is left to `tick`.
        """
        roles = list(dict.fromkeys(watched.spec.role for watched in self.watched))
        for role in roles:
            group = [watched for watched in self.watched if watched.spec.role == role]
            for watched in group:
                self._launch(watched)
            for watched in group:
                try:
                    self._await_ready(watched)
                except LaunchError as error:
                    if watched.spec.restart.is_required:
                        raise
                    self._report(f"{watched.spec.name}: {error}")
                if self._should_stop():
                    return
        self.is_ready = True
        self._on_change()

    def tick(self) -> None:
        """Note what ended and restart what is due."""
        for watched in self.watched:
            self._end_if_closed(watched)
            if watched.child is not None and not watched.child.is_running():
                self._note_end(watched)
            if watched.child is None and time.monotonic() >= watched.restart_at_s:
                self._start_again(watched)

    def run(self) -> None:
        """Watch until told to stop."""
        while not self._should_stop():
            self.tick()
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """SIGTERM to all in reverse order of start, then SIGKILL to what is left of our own groups. Idempotent."""
        running = [watched.child for watched in reversed(self.watched) if watched.child is not None]
        for child in running:
            if child.is_running():
                child.terminate()
        deadline = time.monotonic() + self._grace_s
        while any(child.is_running() for child in running) and time.monotonic() < deadline:
            time.sleep(0.05)
        for child in running:
            if child.is_running():
                self._report(f"{child.spec.name} did not end within {self._grace_s:g} s: killed")
                child.kill()
            self._tell_watchdog(f"-{child.group}")
        for watched in self.watched:
            watched.child = None
        if self._watchdog.stdin is not None and not self._watchdog.stdin.closed:
            self._watchdog.stdin.close()
        self._watchdog.wait()

    def _report(self, text: str) -> None:
        self._attempt("report", lambda: self._tell(text))  # our own output may go to a full disk

    def _launch(self, watched: Watched) -> None:
        self._before_start(watched.spec)
        watched.child = Child(watched.spec, self._base_environment, self._attempt)
        watched.given_up_at_s = watched.child.started_at_s + watched.spec.readiness.deadline_s
        self._tell_watchdog(f"+{watched.child.group}")
        self._on_change()

    def _start_again(self, watched: Watched) -> None:
        """A start that fails, for want of memory or of processes, must not end the others: it is tried again later."""
        watched.num_restarts += 1
        try:
            self._launch(watched)
        except (OSError, subprocess.SubprocessError) as error:
            wait_s = self._delay(watched, lived_long=False)
            self._report(f"{watched.spec.name} could not be started ({error}); trying again in {wait_s:g} s")
        else:
            self._report(f"{watched.spec.name} started again (pid {watched.child and watched.child.pid})")

    def _end_if_closed(self, watched: Watched) -> None:
        """vLLM's server, for one, closes its port and then waits for what its dead core will never answer."""
        now_s = time.monotonic()
        readiness = watched.spec.readiness
        if watched.child is None or readiness.kind != "http" or now_s < watched.look_at_s:
            return
        watched.look_at_s = now_s + _LISTEN_EVERY_S
        if not is_closed(readiness.url):
            watched.given_up_at_s = now_s + CLOSED_FOR_S
            watched.child.note_members()
        elif now_s > watched.given_up_at_s and watched.child.is_running():
            self._report(f"{watched.spec.name} (pid {watched.child.pid}) lives and takes no connections: killed")
            watched.child.kill()

    def _delay(self, watched: Watched, *, lived_long: bool) -> float:
        watched.num_quick_deaths = 0 if lived_long else watched.num_quick_deaths + 1
        wait_s = backoff_s(watched.num_quick_deaths, watched.spec.restart.max_backoff_s)
        watched.restart_at_s = time.monotonic() + wait_s
        return wait_s

    def _note_end(self, watched: Watched) -> None:
        child = watched.child
        assert child is not None
        watched.last_exit_code = child.exit_code
        wait_s = self._delay(watched, lived_long=child.age_s > _HEALTHY_AFTER_S)
        watched.child = None
        self._tell_watchdog(f"-{child.group}")
        self._on_change()
        self._report(
            f"{watched.spec.name} {ending(child.exit_code)}; starting again in {wait_s:g} s, log: {watched.spec.log_file}"
        )

    def _await_ready(self, watched: Watched) -> None:
        child, readiness = watched.child, watched.spec.readiness
        assert child is not None
        told_at_s = 0.0
        while not self._should_stop():
            if not child.is_running():
                raise start_failure(watched.spec, ending(child.exit_code))
            if child.age_s > readiness.deadline_s:
                raise start_failure(watched.spec, f"was not ready within {readiness.deadline_s:g} s")
            if readiness.kind == "alive":
                if child.age_s > min(_ALIVE_AFTER_S, readiness.deadline_s):
                    return
            elif http_status(readiness.url) == 200 and self._has_parts(watched.spec):
                return
            if watched.spec.role == "engine" and child.age_s - told_at_s > _TELL_EVERY_S:
                told_at_s = child.age_s
                self._report(f"{watched.spec.name} {stage(watched.spec.log_file)} ({child.age_s:.0f} s)")
            time.sleep(_POLL_S)

    def _has_parts(self, spec: ProcessSpec) -> bool:
        """Whether Paceline's parts answer inside an engine that is up; raises LaunchError where they never will."""
        if not spec.readiness.parts_url:
            return True
        status = http_status(spec.readiness.parts_url, token=self._engine_token, timeout_s=30.0)
        if status in (200, None):
            return status == 200
        reasons = {
            404: "Paceline's parts are not loaded in vLLM: its control routes are absent. Is the distribution installed in this "
            "environment (`paceline doctor`)?",
            401: "the engine refuses its token; does another engine listen on this port?",
            403: "the engine refuses its token; does another engine listen on this port?",
        }
        raise start_failure(spec, reasons.get(status, f"its parts answer {status} at {spec.readiness.parts_url}"))

    def _tell_watchdog(self, line: str) -> None:
        pipe = self._watchdog.stdin
        if pipe is None or pipe.closed:
            return
        try:
            pipe.write(f"{line}\n".encode())
        except BrokenPipeError:
            self._report("the watchdog is gone; child processes may outlive a SIGKILL of this one")
            pipe.close()


def ending(exit_code: int | None) -> str:
    """How a process ended, in words."""
    if exit_code is not None and exit_code < 0:
        return f"was ended by signal {-exit_code}"
    return f"ended with exit code {exit_code}"


def start_failure(spec: ProcessSpec, what: str) -> LaunchError:
    """The error of a failed start: what happened, the log's last lines, and what to do."""
    lines = logs.tail(spec.log_file)
    quoted = "".join(f"{os.linesep}  | {line}" for line in lines)
    advice = logs.hint(lines) or logs.disk_hint(spec.log_file)
    return LaunchError(
        f"{spec.name} {what}; the last lines of {spec.log_file}:{quoted or ' (empty)'}"
        + (f"{os.linesep}hint: {advice}" if advice else "")
    )
