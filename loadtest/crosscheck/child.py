"""A load tester as a child process that is waited for."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from loadtest.processes import SystemUnderTestError

_DEADLINE_S = 1800.0
_TAIL_CHARACTERS = 2000


async def run_to_end(
    argv: Sequence[str], directory: Path, *, cores: Collection[int], environment: Mapping[str, str] | None = None
) -> None:
    """Run a command in a directory, which also gets its output, on these cores, or where this process runs if there are none.

    Raises SystemUnderTestError with the end of the output where the command fails or does not end.
    """
    output = directory / "output.log"
    with output.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *argv,
            cwd=directory,
            env=None if environment is None else dict(environment),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=(lambda: os.sched_setaffinity(0, cores)) if cores else None,
        )
    try:
        await asyncio.wait_for(process.wait(), _DEADLINE_S)
    except TimeoutError:
        raise SystemUnderTestError(f"{_shown(argv)} did not end within {_DEADLINE_S:.0f} s:\n{_tail(output)}") from None
    finally:
        if process.returncode is None:
            # Some have children of their own.
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if process.returncode:
        raise SystemUnderTestError(f"{_shown(argv)} ended with code {process.returncode}:\n{_tail(output)}")


def _shown(argv: Sequence[str]) -> str:
    return " ".join(argv[:4])


def _tail(output: Path) -> str:
    return output.read_text(errors="replace")[-_TAIL_CHARACTERS:]
