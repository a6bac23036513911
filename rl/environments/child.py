"""A process of ours that is spoken to in frames over its standard input and output: four bytes of length, then that many.

It is killed without ado where it is late; whoever uses it keeps nothing in it that cannot be made again.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import struct
import sys
from typing import BinaryIO, Self

MAX_FRAME_BYTES = 64 << 20
_LENGTH = struct.Struct(">I")
_FINISH_DEADLINE_S = 5.0
_PR_SET_PDEATHSIG = 1
_CHUNK_BYTES = 65536


class ChildDied(Exception):
    """It ended, or said what no child of ours says."""


class Child:
    """The parent's side."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, module: str) -> Self:
        """Run a module of ours, which calls `frames_of_child` first, in a session of its own: Ctrl-C is for us, and we end it."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    async def send(self, frame: bytes) -> None:
        """Raises ChildDied."""
        assert self._process.stdin
        try:
            self._process.stdin.write(_LENGTH.pack(len(frame)) + frame)
            await self._process.stdin.drain()
        except (ConnectionError, RuntimeError) as error:
            raise ChildDied(f"process {self.pid} takes no more: {error}") from error

    async def receive(self) -> bytes:
        """Raises ChildDied."""
        assert self._process.stdout
        try:
            (length,) = _LENGTH.unpack(await self._process.stdout.readexactly(_LENGTH.size))
            if length > MAX_FRAME_BYTES:
                raise ChildDied(f"process {self.pid} announces a frame of {length} bytes; {MAX_FRAME_BYTES} are the most")
            return await self._process.stdout.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise ChildDied(f"process {self.pid} ended") from error

    async def finish(self) -> None:
        """Close its input, upon which it ends by itself; kill it where it does not."""
        assert self._process.stdin
        self._process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FINISH_DEADLINE_S):
                await ended(self._process)
        await self.stop()

    async def stop(self) -> None:
        """Kill it and wait for its end; again is no error."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)  # asyncio's own `kill` may collect the end that its watcher waits for
        await ended(self._process)


async def ended(process: asyncio.subprocess.Process) -> None:
    """Wait for the end of a process whose further output nobody wants.

    asyncio's `wait` returns when the pipes have ended too, and one that is full and not read never does.
    """
    await asyncio.gather(_discard(process.stdout), _discard(process.stderr), process.wait())


async def _discard(stream: asyncio.StreamReader | None) -> None:
    with contextlib.suppress(RuntimeError):  # somebody else reads it to its end
        while stream is not None and await stream.read(_CHUNK_BYTES):
            pass


def frames_of_child(parent_pid: int) -> tuple[BinaryIO, BinaryIO]:
    """The child's side: where frames come from and go to. From here on `print` goes to standard error, and our parent's end is ours."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        raise SystemExit("the parent ended before its child began")
    incoming, outgoing = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    return incoming, outgoing


def read_frame(incoming: BinaryIO) -> bytes | None:
    """None at the end."""
    head = incoming.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    return incoming.read(length)


def write_frame(outgoing: BinaryIO, frame: bytes) -> None:
    outgoing.write(_LENGTH.pack(len(frame)) + frame)
    outgoing.flush()
