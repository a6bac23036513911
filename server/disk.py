"""Disk: file work beside the event loop that cannot hold anybody for ever. A network file system may never answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

from wire.errors import ArtifactError

DEADLINE_S = 60.0
MAX_WAITING = 16
"""Threads that may wait for the disk at once, those that nobody waits for any more among them."""

Result = TypeVar("Result")


class DiskStuck(ArtifactError):
    """The file system does not answer."""

    code = "disk_stuck"


class Disk:
    """The file work of one owner."""

    def __init__(self) -> None:
        self._num_waiting = 0

    async def do(self, work: Callable[[], Result]) -> Result:
        """What `work` returns or raises, in a thread; raises DiskStuck where that takes too long. The thread is left behind then."""
        if self._num_waiting >= MAX_WAITING:
            raise DiskStuck(f"{self._num_waiting} reads of the state directory have not been answered; is its disk there?")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Result] = loop.create_future()

        def tell(result: Result | None, error: BaseException | None) -> None:
            self._num_waiting -= 1
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(result)  # type: ignore[arg-type]

        def run() -> None:
            try:
                result, error = work(), None
            except Exception as raised:  # noqa: BLE001 -- raised anew where the result is awaited
                result, error = None, raised
            if not loop.is_closed():
                loop.call_soon_threadsafe(tell, result, error)

        # A daemon: what hangs in the kernel must not keep this process from ending.
        threading.Thread(target=run, name="disk", daemon=True).start()
        self._num_waiting += 1
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await answer
        except TimeoutError:
            raise DiskStuck(f"the state directory did not answer within {DEADLINE_S:g} s; is its disk there?") from None
