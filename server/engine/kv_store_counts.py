"""What the KV store counts: blocks by what became of them."""

from __future__ import annotations

import threading
from collections import Counter

SAVED, LOADED, EVICTED = "saved", "loaded", "evicted"
LOST, CORRUPT, STALE, LATE = "lost", "corrupt", "stale", "late"
"""Promised, but gone; not the bytes that were written; of weights no longer in force; not there in time. Computed anew each time."""
UNANSWERED = "unanswered"
"""Asked for in vain: DFKV does not answer in time. Taken for absent."""
QUEUE_FULL, STORE_FULL, DISK_ERROR, MIXED = "dropped_queue_full", "dropped_store_full", "dropped_disk_error", "dropped_mixed"
"""Not saved: the store is slower than the engine; all that is stored is held; the disk or DFKV refuses; computed under several weights."""
EVENTS = (SAVED, LOADED, EVICTED, LOST, CORRUPT, STALE, LATE, UNANSWERED, QUEUE_FULL, STORE_FULL, DISK_ERROR, MIXED)
BYTES = ("saved_bytes", "loaded_bytes")


class StoreCounts:
    """Counters since they were last taken, for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, event: str, count: int = 1, *, num_bytes: int = 0) -> None:
        """`num_bytes` are those of all `count` blocks."""
        if count == 0:
            return
        with self._lock:
            self._counts[event] += count
            if num_bytes:
                self._counts[f"{event}_bytes"] += num_bytes

    def take(self) -> dict[str, int]:
        """Blocks by event, and bytes by event with `_bytes` after it."""
        with self._lock:
            taken, self._counts = dict(self._counts), Counter()
        return taken
