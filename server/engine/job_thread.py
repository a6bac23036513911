"""JobThread: a thread that does queued jobs one after another, beside the cores that compute."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from server.engine.affinity import leave_compute_cores

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 5.0

Job = TypeVar("Job")


class JobThread(Generic[Job]):
    """Starts its thread at once; `close` does what is queued and ends it."""

    def __init__(self, name: str, do: Callable[[Job], None], give_up: Callable[[Job], None]) -> None:
        """`give_up` gets each job in which `do` raised; the next one is done all the same. It must not raise itself."""
        self._do = do
        self._give_up = give_up
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def num_queued(self) -> int:
        return self._queue.qsize()

    def put(self, job: Job) -> None:
        self._queue.put(job)

    def close(self) -> None:
        """Waits a few seconds at most: a disk that hangs holds nobody up."""
        self._queue.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        leave_compute_cores()
        while (job := self._queue.get()) is not None:
            try:
                self._do(job)
            except Exception:
                # The thread's outermost loop: whatever one job met must not end all others.
                logger.exception("%s: a job could not be done", self._thread.name)
                self._give_up(job)
