"""What the KV store counts, and how it reaches vLLM's `/metrics`: `paceline_kv_store_blocks_total{event}` and `_bytes_total`."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT

SAVED, LOADED, EVICTED = "saved", "loaded", "evicted"
LOST, CORRUPT, STALE = "lost", "corrupt", "stale"
"""Promised, but gone; not the bytes that were written; of weights that are no longer in force. Computed anew each time."""
QUEUE_FULL, STORE_FULL, DISK_ERROR, MIXED = "dropped_queue_full", "dropped_store_full", "dropped_disk_error", "dropped_mixed"
"""Not saved: the disk is slower than the engine; all that is stored is held; the disk refuses; computed under several weights."""
EVENTS = (SAVED, LOADED, EVICTED, LOST, CORRUPT, STALE, QUEUE_FULL, STORE_FULL, DISK_ERROR, MIXED)
BYTES = ("saved_bytes", "loaded_bytes")


class StoreCounts:
    """Counters since they were last taken, for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, event: str, count: int = 1, *, num_bytes: int = 0) -> None:
        if count == 0:
            return
        with self._lock:
            self._counts[event] += count
            if num_bytes:
                self._counts[f"{event}_bytes"] += num_bytes

    def take(self) -> dict[str, int]:
        with self._lock:
            taken, self._counts = dict(self._counts), Counter()
        return taken


class KvStoreStats(KVConnectorStats):
    """Counts of one step, on their way from a worker to the API server."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.data = dict(Counter(self.data) + Counter(other.data))
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class KvStoreMetrics(KVConnectorPromMetrics):
    """The counters in the API server."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        names = [*labelnames, "event"]
        self._blocks = self._counter_cls(
            name="paceline_kv_store_blocks", documentation="KV blocks of the store by what became of them.", labelnames=names
        )
        self._bytes = self._counter_cls(
            name="paceline_kv_store_bytes", documentation="Bytes of KV blocks saved and loaded.", labelnames=names
        )
        for index in per_engine_labelvalues:
            self.observe(dict.fromkeys((*EVENTS, *BYTES), 0), index)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for key, count in transfer_stats_data.items():
            metric, event = (self._bytes, key.removesuffix("_bytes")) if key in BYTES else (self._blocks, key)
            metric.labels(*labels, event).inc(count)
