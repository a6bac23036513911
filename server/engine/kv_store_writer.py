"""KvWriter: the thread that puts blocks into the store. It never makes a step wait; what it cannot keep is dropped and counted."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial

from server.engine.job_thread import JobThread
from server.engine.kv_store_backend import BlockStore
from server.engine.kv_store_blocks import LayerTensors, encode_block
from server.engine.kv_store_counts import DISK_ERROR, QUEUE_FULL, SAVED, STORE_FULL, StoreCounts
from wire.kv_block_format import KvBlockHeader
from wire.kv_prefix import KvPrefix

logger = logging.getLogger(__name__)

MAX_QUEUED_BYTES = 256 * 1024 * 1024
"""Copies waiting in host memory."""
MAX_QUEUED_JOBS = 4096
RETRY_S = 10.0
"""How long saving rests after the store refused, or nothing could be evicted."""

_Job = tuple[Callable[[], None], int]
"""What to do, and how many bytes of copies that frees."""


class KvWriter:
    """Starts its thread at once; `close` saves what is queued and ends it."""

    def __init__(self, store: BlockStore, counts: StoreCounts) -> None:
        self._store = store
        self._counts = counts
        self._lock = threading.Lock()
        self._num_queued_bytes = 0
        self._rests: tuple[str, float] = (DISK_ERROR, 0.0)
        """Why nothing is saved, and until when."""
        self._thread: JobThread[_Job] = JobThread("paceline-kv-save", self._do, self._give_up)

    def refuses(self, num_blocks: int, num_bytes: int) -> bool:
        """Whether that much more cannot be taken now; counts what is refused. Ask before copying."""
        reason, until_s = self._rests
        is_resting = time.monotonic() < until_s
        with self._lock:
            is_full = self._num_queued_bytes + num_bytes > MAX_QUEUED_BYTES
        if is_resting or is_full:
            self._counts.add(reason if is_resting else QUEUE_FULL, num_blocks)
        return is_resting or is_full

    def save(self, header: KvBlockHeader, tensors: Callable[[], LayerTensors], num_bytes: int) -> None:
        """Queue one block; `tensors` waits until its copy has reached the host."""
        with self._lock:
            self._num_queued_bytes += num_bytes
        self._thread.put((partial(self._save, header, tensors), num_bytes))

    def note_use(self, prefix: KvPrefix, num_prompt_blocks: int, rank: int) -> None:
        """Note the use of a prefix, once what is queued before is saved. Lost where the store is far behind."""
        if self._thread.num_queued < MAX_QUEUED_JOBS:
            self._thread.put((partial(self._store.note_use, prefix, num_prompt_blocks, rank), 0))

    def close(self) -> None:
        self._thread.close()

    def _do(self, job: _Job) -> None:
        work, num_bytes = job
        try:
            work()
        except OSError as error:
            logger.warning("the KV store cannot write, saving rests: %s", error)
            self._rest(DISK_ERROR)
        finally:
            with self._lock:
                self._num_queued_bytes -= num_bytes

    def _give_up(self, _job: _Job) -> None:
        self._rest(DISK_ERROR)

    def _save(self, header: KvBlockHeader, tensors: Callable[[], LayerTensors]) -> None:
        if self._store.has_part(header):  # by another engine, or for another request of this step
            return
        data = encode_block(tensors(), header)
        if not self._store.make_room(len(data)):
            self._rest(STORE_FULL)
            return
        self._store.write(header, data)
        self._counts.add(SAVED, num_bytes=len(data))

    def _rest(self, reason: str) -> None:
        self._counts.add(reason)
        self._rests = (reason, time.monotonic() + RETRY_S)
