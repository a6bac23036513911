"""KvWriter: the thread that puts blocks on disk. It never makes a step wait; what it cannot keep is dropped and counted."""

from __future__ import annotations

import errno
import logging
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from server.engine.job_thread import JobThread
from server.engine.kv_store_blocks import LayerTensors, encode_block
from server.engine.kv_store_counts import DISK_ERROR, EVICTED, QUEUE_FULL, SAVED, STORE_FULL, StoreCounts
from wire.kv_files import KvBlockHeader, KvDirectory, KvRealm

logger = logging.getLogger(__name__)

MAX_QUEUED_BYTES = 256 * 1024 * 1024
"""Copies waiting in host memory."""
MAX_QUEUED_JOBS = 4096
RESERVED_BYTES = 1 << 30
"""Left free on the disk for drafts, checkpoints and logs, which share it."""
RETRY_S = 10.0
"""How long saving rests after the disk refused, or nothing could be evicted."""
_SHRINK_TO = 0.9
"""Share of the bound that is left after an eviction: so it is rare."""
_RECOUNT_S = 30.0
"""Other engines write to the same directory."""

_Job = tuple[Callable[[], None], int]
"""What to do, and how many bytes of copies that frees."""


class KvWriter:
    """Starts its thread at once; `close` saves what is queued and ends it."""

    def __init__(self, directory: KvDirectory, max_bytes: int, counts: StoreCounts) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._counts = counts
        self._lock = threading.Lock()
        self._num_queued_bytes = 0
        self._num_stored_bytes = 0
        self._recount_at_s = 0.0
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

    def touch(self, paths: list[Path]) -> None:
        """Note the use of a prefix, once what is queued before is saved. Lost where the disk is far behind."""
        if self._thread.num_queued < MAX_QUEUED_JOBS:
            self._thread.put((partial(self._directory.touch, paths), 0))

    def close(self) -> None:
        self._thread.close()

    def _do(self, job: _Job) -> None:
        work, num_bytes = job
        try:
            work()
        except OSError as error:
            logger.warning("the KV store cannot write to %s, saving rests: %s", self._directory.root, error)
            self._rest(DISK_ERROR)
        finally:
            with self._lock:
                self._num_queued_bytes -= num_bytes

    def _give_up(self, _job: _Job) -> None:
        self._rest(DISK_ERROR)

    def _save(self, header: KvBlockHeader, tensors: Callable[[], LayerTensors]) -> None:
        realm = KvRealm(header.layout_hash, header.target_version, header.tenant)
        path = self._directory.block_path(realm, header.name, header.rank)
        if path.exists():  # by another engine, or for another request of this step
            return
        data = encode_block(tensors(), header)
        if not self._make_room(len(data)):
            self._rest(STORE_FULL)
            return
        self._directory.write(path, data)
        self._num_stored_bytes += len(data)
        self._counts.add(SAVED, num_bytes=len(data))

    def _make_room(self, num_bytes: int) -> bool:
        self._directory.create()
        if shutil.disk_usage(self._directory.root).free < RESERVED_BYTES:
            raise OSError(errno.ENOSPC, f"less than {RESERVED_BYTES} bytes are free, which are left for the rest of the system")
        is_full = self._num_stored_bytes + num_bytes > self._max_bytes
        if is_full or time.monotonic() >= self._recount_at_s:
            limit = self._max_bytes - num_bytes
            self._num_stored_bytes, num_removed = self._directory.shrink(limit, leave_bytes=int(limit * _SHRINK_TO))
            self._recount_at_s = time.monotonic() + _RECOUNT_S
            self._counts.add(EVICTED, num_removed)
        return self._num_stored_bytes + num_bytes <= self._max_bytes

    def _rest(self, reason: str) -> None:
        self._counts.add(reason)
        self._rests = (reason, time.monotonic() + RETRY_S)
