"""A pool of processes with math-verify in them, and a deadline for every comparison."""

from __future__ import annotations

import asyncio
from typing import Literal

from msgspec import Struct, msgpack

from rl.environments.child import Child, ChildDied
from rl.environments.interface import EnvironmentFailed

Verdict = Literal["right", "wrong", "unreadable", "out_of_time"]
"""`unreadable` is the expected answer; what the model said is at worst wrong."""
_START_DEADLINE_S = 120.0


class Comparison(Struct, frozen=True):
    expected: str
    said: str


class MathVerifier:
    """Processes start when they are first needed; one that is late is killed and another one takes its place."""

    def __init__(self, *, num_processes: int, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._free = asyncio.Queue[Child | None]()
        for _ in range(num_processes):
            self._free.put_nowait(None)
        self._num_processes = num_processes

    async def compare(self, expected: str, said: str) -> Verdict:
        """Waits for a free process. `out_of_time` also where it dies over an answer. Raises EnvironmentFailed where none starts."""
        child = await self._free.get()
        try:
            if child is None or child.has_ended:  # one that died between answers is no verdict on the next one
                child = None
                child = await _start()
            async with asyncio.timeout(self._deadline_s):
                await child.send(msgpack.encode(Comparison(expected, said)))
                return msgpack.decode(await child.receive(), type=Verdict)
        except (TimeoutError, ChildDied):
            if child is None:
                raise EnvironmentFailed("no process for math-verify starts; is the package math-verify installed?") from None
            late, child = child, None
            await late.stop()
            return "out_of_time"
        except asyncio.CancelledError:
            if child is not None:
                late, child = child, None
                await late.stop()
            raise
        finally:
            self._free.put_nowait(child)

    async def close(self) -> None:
        for _ in range(self._num_processes):
            child = await self._free.get()
            if child is not None:
                await child.stop()


async def _start() -> Child:
    """Raises ChildDied or TimeoutError."""
    child = await Child.start("rl.environments.math_child")
    try:
        async with asyncio.timeout(_START_DEADLINE_S):
            await child.receive()
    except BaseException:
        await child.stop()
        raise
    return child
