"""How the KV store's counts reach vLLM's `/metrics`: `paceline_kv_store_blocks_total{event}`, `paceline_kv_store_bytes_total{event}`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from server.engine.kv_store_counts import BYTES, EVENTS

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT


class KvStoreStats(KVConnectorStats):
    """Counts of one step, on their way from a worker to the API server."""

    def reset(self) -> None:
        self.data: dict[str, int] = {}

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
