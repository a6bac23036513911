"""The supervisor against real, tiny child processes."""

from __future__ import annotations

import dataclasses
import fcntl
import http.server
import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from waiting import DEADLINE_S, wait_until

from launch import openmp, supervise
from launch.plan import ProcessSpec, Readiness, RestartPolicy
from launch.rundir import LaunchError
from launch.supervise import Supervisor, backoff_s

ROOT = Path(__file__).resolve().parents[3]
SLEEP = "import time; time.sleep(60)"
IGNORE_TERM = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
WITH_GRANDCHILD = (
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)'])\n"
    "print(child.pid, flush=True); time.sleep(60)"
)


LISTENS_UNTIL = """
import http.server, pathlib, threading, time
server = http.server.ThreadingHTTPServer(("127.0.0.1", {port}), http.server.BaseHTTPRequestHandler)
http.server.BaseHTTPRequestHandler.do_GET = lambda self: (self.send_response(200), self.end_headers())
threading.Thread(target=server.serve_forever, daemon=True).start()
while not pathlib.Path({flag!r}).exists():
    time.sleep(0.02)
server.shutdown(); server.server_close(); time.sleep(60)
"""


def spec(
    tmp_path: Path,
    code: str,
    *,
    name: str = "a",
    required: bool = True,
    readiness: Readiness | None = None,
    env: dict | None = None,
) -> ProcessSpec:
    return ProcessSpec(
        name=name,
        role="engine",
        argv=(sys.executable, "-c", code),
        env=env or {},
        cores=(),
        log_file=tmp_path / f"{name}.log",
        readiness=readiness or Readiness(kind="alive", deadline_s=DEADLINE_S),
        restart=RestartPolicy(is_required=required, max_backoff_s=0.1),
        memory_note="",
    )


class Harness:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.is_stopping = False
        self.supervisors: list[Supervisor] = []

    def supervisor(self, *specs: ProcessSpec, grace_s: float = 5.0, **hooks: Callable[..., None]) -> Supervisor:
        made = Supervisor(
            specs,
            base_environment=os.environ,
            grace_s=grace_s,
            engine_token="secret",
            should_stop=lambda: self.is_stopping,
            **{"report": self.lines.append, **hooks},  # type: ignore[arg-type]
        )
        self.supervisors.append(made)
        return made


@pytest.fixture
def harness() -> Iterator[Harness]:
    made = Harness()
    yield made
    for supervisor in made.supervisors:
        supervisor.stop()


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def first_pid(log: Path) -> int:
    wait_until(lambda: log.is_file() and log.read_text().endswith("\n"))
    return int(log.read_text().split()[0])


@pytest.fixture
def engine_url() -> Iterator[tuple[str, dict[str, int]]]:
    """An HTTP server that answers each path with the status it is told."""
    answers: dict[str, int] = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_private = self.path.startswith("/paceline")
            allowed = not is_private or self.headers["Authorization"] == "Bearer secret"
            self.send_response(answers.get(self.path, 404) if allowed else 401)
            self.end_headers()

        def log_message(self, *_args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", answers
    server.shutdown()
    server.server_close()
    thread.join()


def test_stop_leaves_nothing_running(harness: Harness, tmp_path: Path) -> None:
    supervisor = harness.supervisor(spec(tmp_path, SLEEP), spec(tmp_path, SLEEP, name="b"))
    supervisor.start()
    pids = [watched.child.pid for watched in supervisor.watched if watched.child]
    assert all(is_alive(pid) for pid in pids)
    supervisor.stop()
    assert not any(is_alive(pid) for pid in pids)
    supervisor.stop()


def test_a_nice_child_is_nice_and_its_session_is_not(harness: Harness, tmp_path: Path) -> None:
    supervisor = harness.supervisor(dataclasses.replace(spec(tmp_path, SLEEP), nice=5))
    supervisor.start()
    child = supervisor.watched[0].child
    assert child is not None
    assert psutil.Process(child.pid).nice() == os.getpriority(os.PRIO_PROCESS, 0) + 5
    session = Path(f"/proc/{child.pid}/autogroup")
    if session.exists():
        assert session.read_text().endswith("nice 0\n")


IN_A_TERMINAL = f"""
import os, sys, time
from pathlib import Path
from launch.plan import ProcessSpec, Readiness, RestartPolicy
from launch.supervise import Supervisor
directory = Path(sys.argv[1])
open("/dev/tty").close()
spec = ProcessSpec(name="a", role="engine", argv=(sys.executable, "-c", sys.argv[2]), env={{}}, cores=(), log_file=directory / "a.log",
                   readiness=Readiness(kind="alive", deadline_s=60.0),
                   restart=RestartPolicy(is_required=True, max_backoff_s=1.0), memory_note="")
supervisor = Supervisor([spec], base_environment=os.environ, grace_s=0.5, engine_token="", report=print, should_stop=lambda: False)
supervisor.start()
until_s = time.monotonic() + {DEADLINE_S}
while not (directory / "a.log").read_text().endswith("\\n") and time.monotonic() < until_s:
    time.sleep(0.05)
supervisor.stop()
open("/dev/tty").close()
"""
READS_THE_TERMINAL = """
import time
try:
    open("/dev/tty").readline()
except OSError as error:
    print(error.strerror, flush=True)
time.sleep(60)
"""


def test_a_child_has_no_terminal_to_be_stopped_by_and_its_supervisor_keeps_its_own(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-c", IN_A_TERMINAL, str(tmp_path), READS_THE_TERMINAL],
            stdin=theirs,
            cwd=ROOT,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
    finally:
        os.close(ours)
        os.close(theirs)
    assert done.returncode == 0
    assert (tmp_path / "a.log").read_text() == "No such device or address\n"


def test_a_long_start_tells_what_it_does_now_and_then(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "_TELL_EVERY_S", 0.1)
    slow = Readiness(kind="http", url="http://127.0.0.1:9/", deadline_s=3.0)
    supervisor = harness.supervisor(spec(tmp_path, f"print('Loading drafter model', flush=True); {SLEEP}", readiness=slow))
    with pytest.raises(LaunchError):
        supervisor.start()
    assert sum(line.startswith("a loads the draft (") for line in harness.lines) > 3


def test_a_dead_watchdog_stops_nothing(harness: Harness, tmp_path: Path) -> None:
    supervisor = harness.supervisor(spec(tmp_path, SLEEP))
    supervisor.start()
    supervisor._watchdog.kill()
    supervisor._watchdog.wait()
    before = supervisor.watched[0].child
    assert before is not None
    os.kill(before.pid, signal.SIGKILL)

    def is_back() -> bool:
        supervisor.tick()
        return supervisor.watched[0].child not in (None, before)

    wait_until(is_back)
    supervisor.stop()


def test_a_child_that_ignores_sigterm_is_killed_after_the_grace(harness: Harness, tmp_path: Path) -> None:
    supervisor = harness.supervisor(spec(tmp_path, IGNORE_TERM), grace_s=0.3)
    supervisor.start()
    wait_until(lambda: "up" in (tmp_path / "a.log").read_text())
    supervisor.stop()
    assert any("killed" in line for line in harness.lines)


def test_grandchildren_go_with_the_group(harness: Harness, tmp_path: Path) -> None:
    supervisor = harness.supervisor(spec(tmp_path, WITH_GRANDCHILD))
    supervisor.start()
    grandchild = first_pid(tmp_path / "a.log")
    assert is_alive(grandchild)
    supervisor.stop()
    wait_until(lambda: not is_alive(grandchild))


def test_the_shared_memory_that_openmp_leaves_goes_with_the_group(harness: Harness, tmp_path: Path) -> None:
    supervisor = harness.supervisor(
        spec(tmp_path, WITH_GRANDCHILD, name="stopped"), spec(tmp_path, WITH_GRANDCHILD, name="killed")
    )
    supervisor.start()
    stopped, killed = (watched.child for watched in supervisor.watched)
    assert stopped is not None
    assert killed is not None
    pids = [stopped.pid, first_pid(tmp_path / "stopped.log"), killed.pid, first_pid(tmp_path / "killed.log")]
    marks = [Path(f"/dev/shm/__KMP_REGISTERED_LIB_{pid}_{os.getuid()}") for pid in (*pids, os.getpid())]
    untouched = [marks[-1].with_name(f"{marks[0].name}{ending}") for ending in ("1", ".other")]
    are_ours = [not path.exists() for path in (*marks, *untouched)]
    for path in (*marks, *untouched):
        path.touch()
    try:
        killed.note_members()
        os.kill(pids[3], signal.SIGKILL)  # alone and first, so that nobody can tell any more whose it was
        wait_until(lambda: not is_alive(pids[3]))
        os.kill(killed.pid, signal.SIGKILL)
        wait_until(lambda: not killed.is_running())
        supervisor.stop()
        assert [path.exists() for path in (*marks, *untouched)] == [False] * 4 + [True] * 3
    finally:
        for path, is_ours in zip((*marks, *untouched), are_ours, strict=True):
            if is_ours:
                path.unlink(missing_ok=True)


def test_the_shared_memory_that_openmp_leaves_is_named_by_process_and_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openmp, "_SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(os, "getuid", lambda: 10001)
    names = ["__KMP_REGISTERED_LIB_7_10001", "__KMP_REGISTERED_LIB_7_0", "__KMP_REGISTERED_LIB_8_10001"]
    for name in names:
        (tmp_path / name).touch()
    openmp.remove_marks([7, 9])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:])


def test_what_ends_is_started_again_and_its_leftovers_are_killed(harness: Harness, tmp_path: Path) -> None:
    supervisor = harness.supervisor(spec(tmp_path, WITH_GRANDCHILD))
    supervisor.start()
    first = supervisor.watched[0].child
    assert first is not None
    grandchild = first_pid(tmp_path / "a.log")
    os.kill(first.pid, signal.SIGKILL)

    def is_started_again() -> bool:
        supervisor.tick()
        child = supervisor.watched[0].child
        return child is not None and child is not first

    wait_until(is_started_again)
    wait_until(lambda: not is_alive(grandchild))
    assert supervisor.watched[0].num_restarts == 1
    assert supervisor.watched[0].last_exit_code == -signal.SIGKILL
    assert (tmp_path / "a.log.1").is_file()


def test_what_lives_and_takes_no_connections_any_more_is_started_again(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "CLOSED_FOR_S", 0.5)
    monkeypatch.setattr(supervise, "_LISTEN_EVERY_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    flag = tmp_path / "close"
    ready = Readiness(kind="http", url=f"http://127.0.0.1:{port}/", deadline_s=DEADLINE_S)
    supervisor = harness.supervisor(spec(tmp_path, LISTENS_UNTIL.format(port=port, flag=str(flag)), readiness=ready))
    supervisor.start()
    listening_until_s = time.monotonic() + 1.0
    tick_until(supervisor, lambda: time.monotonic() > listening_until_s)
    assert supervisor.watched[0].num_restarts == 0
    flag.touch()
    tick_until(supervisor, lambda: supervisor.watched[0].num_restarts == 1)
    assert supervisor.watched[0].last_exit_code == -signal.SIGKILL


def test_an_optional_process_that_fails_does_not_stop_the_start(harness: Harness, tmp_path: Path) -> None:
    supervisor = harness.supervisor(spec(tmp_path, "raise SystemExit(3)", required=False), spec(tmp_path, SLEEP, name="b"))
    supervisor.start()
    assert any("ended with exit code 3" in line for line in harness.lines)


def test_a_failed_start_quotes_the_log_and_gives_a_hint(harness: Harness, tmp_path: Path) -> None:
    code = "import sys; print('OSError: [Errno 98] Address already in use', file=sys.stderr); sys.exit(1)"
    never = Readiness(kind="http", url="http://127.0.0.1:9/health", deadline_s=DEADLINE_S)
    with pytest.raises(LaunchError) as caught:
        harness.supervisor(spec(tmp_path, code, readiness=never)).start()
    message = str(caught.value)
    assert "a ended with exit code 1" in message
    assert "| OSError: [Errno 98] Address already in use" in message
    assert "hint: another process holds the port" in message


def test_a_start_that_takes_too_long_is_given_up(harness: Harness, tmp_path: Path) -> None:
    never = Readiness(kind="http", url="http://127.0.0.1:9/health", deadline_s=0.5)
    with pytest.raises(LaunchError, match=r"was not ready within 0\.5 s"):
        harness.supervisor(spec(tmp_path, SLEEP, readiness=never)).start()


def test_a_signal_ends_the_wait_for_readiness(harness: Harness, tmp_path: Path) -> None:
    never = Readiness(kind="http", url="http://127.0.0.1:9/health", deadline_s=60.0)
    threading.Timer(0.3, lambda: setattr(harness, "is_stopping", True)).start()
    supervisor = harness.supervisor(spec(tmp_path, SLEEP, readiness=never))
    supervisor.start()
    assert not supervisor.is_ready


def test_whoever_is_told_of_changes_sees_when_all_is_ready(harness: Harness, tmp_path: Path) -> None:
    seen: list[bool] = []
    supervisor = harness.supervisor(spec(tmp_path, SLEEP), on_change=lambda: seen.append(supervisor.is_ready))
    supervisor.start()
    assert seen == [False, True]


def test_an_engine_is_ready_when_it_and_our_parts_answer(
    harness: Harness, tmp_path: Path, engine_url: tuple[str, dict[str, int]]
) -> None:
    url, answers = engine_url
    answers |= {"/health": 200, "/paceline/status": 200}
    ready = Readiness(kind="http", url=f"{url}/health", parts_url=f"{url}/paceline/status", deadline_s=DEADLINE_S)
    harness.supervisor(spec(tmp_path, SLEEP, readiness=ready)).start()


@pytest.mark.parametrize(
    ("status", "words"), [(404, "parts are not loaded in vLLM"), (401, "refuses its token"), (500, "answer 500")]
)
def test_an_engine_without_our_parts_fails_loudly(
    harness: Harness, tmp_path: Path, engine_url: tuple[str, dict[str, int]], status: int, words: str
) -> None:
    url, answers = engine_url
    answers |= {"/health": 200, "/paceline/status": status}
    ready = Readiness(kind="http", url=f"{url}/health", parts_url=f"{url}/paceline/status", deadline_s=DEADLINE_S)
    with pytest.raises(LaunchError, match=words):
        harness.supervisor(spec(tmp_path, SLEEP, readiness=ready)).start()


def test_dangerous_variables_do_not_reach_a_child(harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("PACELINE_OPERATOR_TOKEN", "secret")
    names = ["VLLM_SERVER_DEV_MODE", "PYTHONPATH", "PACELINE_OPERATOR_TOKEN", "MINE"]
    code = f"import os, time; print([os.environ.get(name) for name in {names!r}], flush=True); time.sleep(60)"
    harness.supervisor(spec(tmp_path, code, env={"MINE": "yes"})).start()
    wait_until(lambda: "]" in (tmp_path / "a.log").read_text())
    assert (tmp_path / "a.log").read_text().strip() == "[None, None, None, 'yes']"


def tick_until(supervisor: Supervisor, condition: Callable[[], bool]) -> None:
    def ticked() -> bool:
        supervisor.tick()
        return condition()

    wait_until(ticked)


def test_processes_start_again_though_neither_log_nor_report_can_be_written(
    harness: Harness, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logs = tmp_path / "logs"
    full = open("/dev/full", "w")  # noqa: SIM115
    supervisor = harness.supervisor(spec(logs, SLEEP), report=lambda text: print(text, file=full, flush=True))
    supervisor.start()
    shutil.rmtree(logs)
    logs.write_text("a file where the directory was")
    for number in (1, 2):
        child = supervisor.watched[0].child
        assert child is not None
        os.kill(child.pid, signal.SIGKILL)
        tick_until(supervisor, lambda number=number: supervisor.watched[0].num_restarts == number)
    child = supervisor.watched[0].child
    assert child is not None
    assert is_alive(child.pid)
    assert Path(f"/proc/{child.pid}/fd/1").readlink() == Path("/dev/null")
    told = capfd.readouterr().err
    assert told.count(f"cannot open {logs / 'a.log'}") == 1
    assert told.count("cannot report") == 1


def test_the_hook_runs_ahead_of_every_start(harness: Harness, tmp_path: Path) -> None:
    started: list[str] = []
    supervisor = harness.supervisor(
        spec(tmp_path, SLEEP), before_start=lambda spec: started.append(f"{spec.name} {(tmp_path / 'a.log').exists()}")
    )
    supervisor.start()
    assert started == ["a False"]
    child = supervisor.watched[0].child
    assert child is not None
    os.kill(child.pid, signal.SIGKILL)
    tick_until(supervisor, lambda: supervisor.watched[0].num_restarts == 1)
    assert len(started) == 2


def test_nothing_survives_a_sigkill_of_the_supervisor(tmp_path: Path) -> None:
    script = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from launch import openmp, supervise
from launch.plan import ProcessSpec, Readiness, RestartPolicy
from launch.supervise import Supervisor
spec = ProcessSpec(name="a", role="engine", argv=(sys.executable, "-c", {WITH_GRANDCHILD!r}), env={{}}, cores=(),
                   log_file=Path({str(tmp_path)!r}) / "a.log", readiness=Readiness(kind="alive", deadline_s=60.0),
                   restart=RestartPolicy(is_required=True, max_backoff_s=1.0), memory_note="")
supervisor = Supervisor([spec], base_environment=os.environ, grace_s=0.5, engine_token="", report=print, should_stop=lambda: False)
supervisor.start()
print(supervisor.watched[0].child.pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT) as owner:
        assert owner.stdout is not None
        child = int(owner.stdout.readline())
        grandchild = first_pid(tmp_path / "a.log")
        assert is_alive(child)
        assert is_alive(grandchild)
        owner.kill()
    wait_until(lambda: not is_alive(child) and not is_alive(grandchild))


def test_waits_between_restarts_double_up_to_a_bound() -> None:
    assert [backoff_s(deaths, 30.0) for deaths in range(7)] == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert backoff_s(10_000, 30.0) == 30.0


def test_a_restart_that_cannot_fork_or_find_its_program_ends_nobody_else(tmp_path: Path, harness: Harness) -> None:
    program = tmp_path / "interpreter"
    program.symlink_to(sys.executable)
    fragile = dataclasses.replace(spec(tmp_path, SLEEP, name="fragile"), argv=(str(program), "-c", SLEEP))
    supervisor = harness.supervisor(fragile, spec(tmp_path, SLEEP, name="other"))
    supervisor.start()
    broken, other = supervisor.watched
    program.unlink()
    assert broken.child is not None
    assert other.child is not None
    broken.child.kill()
    tick_until(supervisor, lambda: broken.num_restarts >= 2)
    assert broken.child is None
    assert other.child.is_running()
    program.symlink_to(sys.executable)
    tick_until(supervisor, lambda: broken.child is not None and broken.child.is_running())
