"""Processes under measurement: started, awaited by HTTP, and stopped for certain."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import aiohttp

from loadtest.client import new_session
from wire.errors import PacelineError

START_DEADLINE_S = 900.0
POLL_S = 0.5
_STOP_DEADLINE_S = 60.0
_TAIL_LINES = 40


class SystemUnderTestError(PacelineError):
    """The system under measurement did not start, or does not do what it must for a measurement."""

    code = "system_under_test"


@asynccontextmanager
async def running_process(
    argv: Sequence[str],
    *,
    ready_url: str,
    environment: Mapping[str, str] | None = None,
    deadline_s: float = START_DEADLINE_S,
    cores: Collection[int] = (),
) -> AsyncIterator[subprocess.Popen[bytes]]:
    """Start a process in a session of its own, yield it when `ready_url` answers 200, stop it.

    It runs on `cores`, where some are given, else where this process does.
    Raises SystemUnderTestError with the last lines of its output where it does not come up.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as directory:
        output = Path(directory) / "output.log"
        with output.open("wb") as log:
            process = subprocess.Popen(
                list(argv),
                env=None if environment is None else dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            if cores:
                os.sched_setaffinity(process.pid, cores)
            await _until_healthy(process, ready_url, output, time.monotonic() + deadline_s)
            yield process
        finally:
            await stop(process)


@contextmanager
def one_core_left_free() -> Iterator[Collection[int]]:
    """This process, and what it starts meanwhile, keeps off one core; yields it, for what is measured."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[1:] or cores)
    try:
        yield cores[:1]
    finally:
        os.sched_setaffinity(0, cores)


def check_alive(process: subprocess.Popen[bytes], output: Path, deadline_s: float) -> None:
    """Raises SystemUnderTestError where the process has ended or `deadline_s` of the monotonic clock is past."""
    if process.poll() is None and time.monotonic() < deadline_s:
        return
    tail = "\n".join(output.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
    what = "was not ready in time" if process.poll() is None else f"ended with code {process.returncode}"
    raise SystemUnderTestError(f"{' '.join(map(str, process.args[1:4]))} {what}:\n{tail}")  # type: ignore[index]


async def stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, and SIGKILL where that does not help."""
    if process.poll() is None:
        process.terminate()
    try:
        await asyncio.to_thread(process.wait, _STOP_DEADLINE_S)
    except subprocess.TimeoutExpired:
        if os.getpgid(process.pid) == process.pid:
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()


async def _until_healthy(process: subprocess.Popen[bytes], url: str, output: Path, deadline_s: float) -> None:
    async with new_session(1) as session:
        while True:
            check_alive(process, output, deadline_s)
            try:
                async with session.get(url) as response:
                    if response.status == 200:
                        return
            except (aiohttp.ClientError, OSError):
                pass
            await asyncio.sleep(POLL_S)
