"""Programs that mean no good, run for real."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path

import psutil
import pytest
from waiting import wait_until

from rl.environments import sandbox_init
from rl.environments.interface import EnvironmentFailed
from rl.environments.sandbox import Execution, Limits, Ran, run_program

ROOT = Path(__file__).parents[3]
PATIENT = Limits(wall_s=300.0)
"""For programs that are to end by themselves, however slow the machine is."""


def run(source: str, limits: Limits = PATIENT, execution: Execution = "limits_only", stdin: bytes = b"") -> Ran:
    return asyncio.run(run_program(source, limits, execution, stdin=stdin))


@cache
def isolation() -> str:
    """Empty where this kernel has it, else why not."""
    try:
        return "" if run("", execution="isolated").is_isolated else "the program ran, but not isolated"
    except EnvironmentFailed as error:
        return str(error)


def need_isolation() -> None:
    if isolation():
        pytest.skip(isolation())


def processes_of(marker: str) -> list[psutil.Process]:
    """Ours are in new PID namespaces, and still seen from here."""
    found = []
    for process in psutil.process_iter():
        try:
            if marker in process.name():
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def test_a_program_answers_from_an_empty_world() -> None:
    ran = run(
        "import os, sys; print(sys.stdin.read(), os.listdir(), [name for name in os.environ if name != 'LC_CTYPE'])",
        stdin=b"hello",
    )
    assert (ran.outcome, ran.exit_code) == ("exited", 0)
    words = ran.stdout.decode().split()
    assert words[0] == "hello"
    assert words[-1] == "[]"
    if ran.is_isolated:
        assert words[1] == "['program.py']"


def test_how_a_program_ends_is_told() -> None:
    assert run("raise SystemExit(3)").exit_code == 3
    failed = run("1 / 0")
    assert failed.exit_code == 1
    assert b"ZeroDivisionError" in failed.stderr
    killed = run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert (killed.outcome, killed.exit_code) == ("killed", 128 + 9)


def test_nothing_runs_unless_it_is_turned_on(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFailed, match="off"):
        run(f"open({str(tmp_path / 'ran')!r}, 'w')", execution="off")
    assert not list(tmp_path.iterdir())


def test_an_infinite_loop_is_stopped_by_its_processor_time() -> None:
    ran = run("while True: pass", Limits(wall_s=300.0, cpu_s=1))
    assert ran.outcome == "killed"


def test_a_sleeper_is_stopped_by_the_clock() -> None:
    ran = run("print('begun', flush=True)\nimport time; time.sleep(3600)", Limits(wall_s=3.0))
    assert ran.outcome == "out_of_time"
    assert ran.duration_s < 300


def test_a_flood_of_output_is_capped_on_either_stream() -> None:
    for stream in ("stdout", "stderr"):
        ran = run(f"import sys\nwhile True: sys.{stream}.write('x' * 4096)", Limits(wall_s=300.0, output_bytes=10_000))
        assert ran.outcome == "too_much_output"
        assert len(ran.stdout) + len(ran.stderr) == 10_000


def test_a_flood_on_both_streams_shares_the_cap() -> None:
    source = "import os\nwhile True: os.write(1, b'x' * 4096); os.write(2, b'x' * 4096)"
    for output_bytes in range(10_000, 10_010):
        ran = run(source, Limits(wall_s=300.0, output_bytes=output_bytes))
        assert len(ran.stdout) + len(ran.stderr) == output_bytes


def test_memory_is_limited() -> None:
    ran = run("try: bytearray(1 << 30)\nexcept MemoryError: print('refused')", Limits(wall_s=300.0, memory_bytes=256 << 20))
    assert ran.stdout == b"refused\n"


def test_a_file_is_limited() -> None:
    source = """
size = 0
try:
    with open('big', 'wb', buffering=0) as file:
        while True:
            size += file.write(b'0' * 65536)
except OSError as error:
    print(size, error.errno)
"""
    assert run(source, Limits(wall_s=300.0, file_bytes=1 << 20)).stdout == b"1048576 27\n"


def test_all_files_together_are_limited() -> None:
    need_isolation()
    source = """
size = 0
try:
    for number in range(100):
        with open(f'file{number}', 'wb', buffering=0) as file:
            size += file.write(b'0' * (1 << 20))
except OSError as error:
    print(size <= 4 << 20, error.errno)
"""
    assert run(source, Limits(wall_s=300.0, disk_bytes=4 << 20)).stdout == b"True 28\n"


def test_a_fork_bomb_meets_its_limit() -> None:
    need_isolation()
    source = """
import os, time
born = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(600)
        born += 1
except OSError as error:
    print(born, error.errno)
"""
    ran = run(source, Limits(wall_s=300.0, num_processes=8))
    born, errno = map(int, ran.stdout.split())
    assert 0 < born < 8
    assert errno == 11


def test_a_fork_bomb_that_never_gives_up_is_ended_whole() -> None:
    need_isolation()
    marker = f"bomb{os.getpid()}"
    source = f"""
import ctypes, os
ctypes.CDLL(None).prctl(15, {marker!r}.encode(), 0, 0, 0)
while True:
    try:
        os.fork()
    except OSError:
        pass
"""
    most = 0

    async def watched() -> Ran:
        nonlocal most
        running = asyncio.create_task(run_program(source, Limits(wall_s=3.0, num_processes=8), "isolated"))
        while not running.done():
            most = max(most, len(processes_of(marker)))
            await asyncio.sleep(0.2)
        return await running

    assert asyncio.run(watched()).outcome == "out_of_time"
    assert 1 <= most <= 8
    wait_until(lambda: not processes_of(marker), "for the end of the bomb")


def test_a_child_that_leaves_its_session_does_not_outlive_the_program() -> None:
    need_isolation()
    marker = f"stray{os.getpid()}"
    source = f"""
import ctypes, os, time
if os.fork() == 0:
    os.setsid()
    ctypes.CDLL(None).prctl(15, {marker!r}.encode(), 0, 0, 0)
    os.close(1); os.close(2)
    time.sleep(600)
print('left it')
"""
    assert run(source).stdout == b"left it\n"
    wait_until(lambda: not processes_of(marker), "for the end of the child")


def in_a_world_without_namespaces(source: str, execution: Execution, wall_s: float = 100.0) -> str:
    """What becomes of a program where the kernel refuses further namespaces: an outer one that may have none inside."""
    code = f"""
import asyncio
from rl.environments.interface import EnvironmentFailed
from rl.environments.sandbox import Limits, run_program
try:
    ran = asyncio.run(run_program({source!r}, Limits(wall_s={wall_s}), {execution!r}))
    print(ran.outcome, ran.exit_code, ran.is_isolated, ran.stdout.decode().strip())
except EnvironmentFailed as error:
    print('refused:', error)
"""
    inner = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    argv = ["unshare", "--user", "--map-root-user", "sh", "-c", inner, "sh", sys.executable, "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_without_namespaces_limits_alone_are_taken_only_where_they_were_asked_for() -> None:
    need_isolation()
    assert in_a_world_without_namespaces("print(1 + 1)", "limits_only") == "exited 0 False 2"
    assert in_a_world_without_namespaces("print(1 + 1)", "isolated").startswith("refused: the sandbox did not start")


def test_where_mounts_are_refused_limits_alone_are_taken_only_where_they_were_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_isolation()
    source = Path(sandbox_init.__file__).read_text()
    refusing = 'def _mount(*words, **more):\n    raise OSError(1, "no mounts here")\n\n\nif __name__ =='
    (tmp_path / "init.py").write_text(source.replace("if __name__ ==", refusing))
    monkeypatch.setattr("rl.environments.sandbox._INIT", tmp_path / "init.py")
    ran = run("print(open('program.py').read())")
    assert (ran.outcome, ran.exit_code, ran.is_isolated) == ("exited", 0, False)
    with pytest.raises(EnvironmentFailed, match="no mounts here"):
        run("", execution="isolated")


def test_without_namespaces_children_end_with_the_program_as_well() -> None:
    need_isolation()
    marker = f"left{os.getpid()}"
    source = f"""
import ctypes, os, time
ctypes.CDLL(None).prctl(15, {marker!r}.encode(), 0, 0, 0)
os.fork()
time.sleep(600)
"""
    assert in_a_world_without_namespaces(source, "limits_only", wall_s=4.0).startswith("out_of_time 137 False")
    wait_until(lambda: not processes_of(marker), "for the end of both")


def test_there_is_no_network() -> None:
    need_isolation()
    server = socket.create_server(("127.0.0.1", 0))
    accepted: list[object] = []
    listener = threading.Thread(target=lambda: accepted.append(server.accept()), daemon=True)
    listener.start()
    port = server.getsockname()[1]
    source = f"""
import socket
try:
    socket.create_connection(('127.0.0.1', {port}), 5)
    print('connected')
except OSError as error:
    print(error.errno)
"""
    assert run(source).stdout == b"101\n"  # the network is unreachable
    assert not accepted
    socket.create_connection(("127.0.0.1", port)).close()  # from here it is reachable
    listener.join(30)
    assert accepted
    server.close()


def test_other_files_are_neither_read_nor_written(tmp_path: Path) -> None:
    need_isolation()
    secret = tmp_path / "secret"
    secret.write_text("secret")
    source = f"""
def attempt(what):
    try:
        what()
        print('done')
    except OSError as error:
        print('refused')
attempt(lambda: open({str(secret)!r}).read())
attempt(lambda: open({str(secret)!r}, 'w'))
attempt(lambda: open('/usr/written', 'w'))
attempt(lambda: open('/written', 'w'))
attempt(lambda: open('/proc/1/environ').read())
attempt(lambda: open('here', 'w'))
"""
    assert run(source).stdout.split() == [b"refused"] * 5 + [b"done"]
    assert secret.read_text() == "secret"


def test_no_new_namespace_and_no_other_user_can_be_had_inside() -> None:
    need_isolation()
    source = """
import ctypes, os
libc = ctypes.CDLL(None)
print(libc.unshare(0x10000000), os.getuid() != 0, len([pid for pid in range(1, 5000) if libc.kill(pid, 0) == 0]) <= 2)
"""
    assert run(source).stdout == b"-1 True True\n"


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    for source in ("open('kept', 'w').write('x')", "while True: print('x' * 1000)"):
        run(source)
    assert not list(tmp_path.iterdir())


def test_a_program_that_ends_with_its_pipe_full_is_waited_for() -> None:
    """Its output comes faster than it is read, so that the pipe is not empty when the limit is reached."""
    for _ in range(20):
        flood = "import os\nwhile True: os.write(1, b'x' * 1000000)"
        assert run(flood, Limits(wall_s=300.0, output_bytes=100)).outcome == "too_much_output"
