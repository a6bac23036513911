"""Running a program that nobody has read: in a process of its own, bounded in time, memory, processes, files and output.

Best effort, and off unless the configuration says otherwise. Where the kernel allows it the program sees no network, no file but
the interpreter's and the system's libraries, and no other process (`sandbox_init.py`); where it does not, there are rlimits, a
group that is killed whole, a temporary directory and an empty environment. It is no defence against a hole in the kernel.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct
from pydantic import Field

from rl.environments.child import ended
from rl.environments.interface import EnvironmentFailed
from wire.config import Config

Execution = Literal["off", "isolated", "limits_only"]
"""`isolated` refuses a kernel without namespaces; `limits_only` goes on there without them."""
_INIT = Path(__file__).with_name("sandbox_init.py")
_CHUNK_BYTES = 65536
_START_DEADLINE_S = 120.0
_END_DEADLINE_S = 10.0


class Limits(Config):
    wall_s: float = Field(default=10.0, gt=0)
    """From the program's begin."""
    cpu_s: int = Field(default=5, gt=0)
    """Of each process."""
    memory_bytes: int = Field(default=512 << 20, ge=64 << 20)
    """Of address space, of each process."""
    num_processes: int = Field(default=16, ge=1)
    """Threads are counted as well. Without namespaces root is not bound by it, and other users share it with all they run."""
    file_bytes: int = Field(default=16 << 20, ge=0)
    """Of each file."""
    disk_bytes: int = Field(default=32 << 20, ge=1 << 20)
    """Of all files together; held in isolation only."""
    output_bytes: int = Field(default=64 << 10, gt=0)
    """Of standard output and standard error together."""


class Ran(Struct, frozen=True, kw_only=True):
    """How a program ended. `killed` is by a signal, such as that of the limit on CPU time; the last two are ours."""

    outcome: Literal["exited", "killed", "out_of_time", "too_much_output"]
    exit_code: int
    """128 and the signal where one ended it."""
    stdout: bytes
    stderr: bytes
    is_isolated: bool
    duration_s: float


async def run_program(source: str, limits: Limits, execution: Execution, *, stdin: bytes = b"") -> Ran:
    """Run Python source to its end or to a limit. Raises EnvironmentFailed where the sandbox, not the program, fails."""
    if execution == "off":
        raise EnvironmentFailed(
            "running programs is off; set execution to 'isolated', or to 'limits_only' on a kernel without it"
        )
    with tempfile.TemporaryDirectory(prefix="paceline-sandbox-", ignore_cleanup_errors=True) as directory:
        (Path(directory) / "program.py").write_text(source, encoding="utf-8", errors="replace")
        status_fd, their_status_fd = os.pipe()
        try:
            words = limits.model_dump() | {
                "directory": directory,
                "is_isolation_required": execution == "isolated",
                "status_fd": their_status_fd,
            }
            process = await asyncio.create_subprocess_exec(
                os.path.realpath(sys.executable),
                *("-I", "-S", "-B", str(_INIT), msgspec.json.encode(words).decode()),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={},
                cwd=directory,
                start_new_session=True,
                pass_fds=(their_status_fd,),
            )
            os.close(their_status_fd)
            their_status_fd = -1
            try:
                await _begun(status_fd)
                begun_s = time.monotonic()
                cut_short, stdout, stderr = await _watch(process, limits, stdin)
            finally:
                await _kill_group(process)
            return _told(process, _status(status_fd), cut_short, stdout, stderr, time.monotonic() - begun_s)
        finally:
            os.close(status_fd)
            if their_status_fd >= 0:
                os.close(their_status_fd)


async def _begun(status_fd: int) -> None:
    """Return once the first process has said how far it got, or ended: building the fence is not the program's time."""
    is_readable = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(status_fd, is_readable.set)
    try:
        async with asyncio.timeout(_START_DEADLINE_S):
            await is_readable.wait()
    except TimeoutError:
        raise EnvironmentFailed(f"the sandbox did not start within {_START_DEADLINE_S:g} s") from None
    finally:
        loop.remove_reader(status_fd)


async def _watch(
    process: asyncio.subprocess.Process, limits: Limits, stdin: bytes
) -> tuple[Literal["out_of_time", "too_much_output"] | None, bytes, bytes]:
    """Feed it, read it within the limits; what cut it short, if anything did, and what it said until then."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    room = limits.output_bytes
    said: dict[asyncio.StreamReader, bytearray] = {process.stdout: bytearray(), process.stderr: bytearray()}

    async def read(stream: asyncio.StreamReader) -> None:
        nonlocal room
        while chunk := await stream.read(_CHUNK_BYTES):
            said[stream] += chunk[: max(room, 0)]  # the other stream may have used it up
            room -= len(chunk)
            if room < 0:
                raise OverflowError

    async def feed(pipe: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            pipe.write(stdin)
            await pipe.drain()
            pipe.close()

    cut_short: Literal["out_of_time", "too_much_output"] | None = None
    tasks = [asyncio.ensure_future(work) for work in (read(process.stdout), read(process.stderr), feed(process.stdin))]
    try:
        async with asyncio.timeout(limits.wall_s):
            await asyncio.gather(*tasks)
            await process.wait()
    except TimeoutError:
        cut_short = "out_of_time"
    except OverflowError:
        cut_short = "too_much_output"
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return cut_short, bytes(said[process.stdout]), bytes(said[process.stderr])


async def _kill_group(process: asyncio.subprocess.Process) -> None:
    """Everything it started, also after its own end; in isolation what left the group dies with its namespace.

    Raises EnvironmentFailed where something that left the group holds its output open.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        async with asyncio.timeout(_END_DEADLINE_S):
            await ended(process)
    except TimeoutError:
        raise EnvironmentFailed("the program left processes behind that hold its output open") from None


def _status(status_fd: int) -> str:
    """What the first process said: it is dead, so that nothing more comes."""
    os.set_blocking(status_fd, False)
    try:
        return os.read(status_fd, _CHUNK_BYTES).decode(errors="replace")
    except BlockingIOError:
        return ""


def _told(
    process: asyncio.subprocess.Process,
    status: str,
    cut_short: Literal["out_of_time", "too_much_output"] | None,
    stdout: bytes,
    stderr: bytes,
    duration_s: float,
) -> Ran:
    if "failed:" in status or not status:
        raise EnvironmentFailed(f"the sandbox did not start: {status or stderr.decode(errors='replace') or 'it said nothing'}")
    code = process.returncode if process.returncode is not None else -signal.SIGKILL
    exit_code = code if code >= 0 else 128 - code
    return Ran(
        outcome=cut_short or ("killed" if exit_code > 128 else "exited"),
        exit_code=exit_code,
        stdout=stdout,
        stderr=stderr,
        is_isolated=status == "isolated",
        duration_s=duration_s,
    )
