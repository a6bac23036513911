"""PacelineKvStore: vLLM's KV connector that keeps KV of finished conversations on a POSIX path, or in DFKV.

    --kv-transfer-config '{"kv_connector": "PacelineKvStore", "kv_connector_module_path": "server.engine.kv_store_connector",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"directory": "<state>/kv", "max_bytes": 10000000000}}'

With `"kv_connector_extra_config": {"dfkv": {"members": "name=ip:port", "library": "<path>", "namespace": "paceline"}}` in DFKV.
Alone, or in a MultiConnector after NIXL, whose pulls then come first. vLLM makes one instance in the scheduler and one in
each worker; this class only hands vLLM's calls to the side that is meant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from server.engine.kv_store_backend import open_store
from server.engine.kv_store_counts import StoreCounts
from server.engine.kv_store_metrics import KvStoreMetrics, KvStoreStats
from server.engine.kv_store_orders import StepOrders, StepReport
from server.engine.kv_store_resolve import resolve_layout
from server.engine.kv_store_scheduler import StoreScheduler
from server.engine.kv_store_version import target_version
from server.engine.kv_store_worker import StoreWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
        PromMetric,
        PromMetricT,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class PacelineKvStore(KVConnectorBase_V1, SupportsHMA):
    """Raises ConfigError at start where it cannot serve the engine; afterwards no fault of its store reaches a request."""

    _cache_hit_source = CacheHitSource.DISK

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._layout = resolve_layout(vllm_config, kv_cache_config)
        self._counts = StoreCounts()
        self._store = open_store(vllm_config.kv_transfer_config, self._counts)
        self._scheduler = StoreScheduler(self._layout, self._store)
        self._worker: StoreWorker | None = None
        """In a worker, once the cache is there."""

    @property
    def requires_kv_delivery(self) -> bool:
        """What is not saved is computed again."""
        return False

    # In both: each side tells what it counted.

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        counts = self._counts.take()
        return KvStoreStats(data=counts) if counts else None

    # In the workers.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        rank = self._vllm_config.parallel_config.rank
        num_blocks = self._kv_cache_config.num_blocks
        self._worker = StoreWorker(self._layout, self._store, self._counts, rank, num_blocks, kv_caches, target_version)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        orders = self._get_connector_metadata()
        if self._worker is not None and isinstance(orders, StepOrders):
            self._worker.begin_step(orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Requests wait for their loads outside of steps."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are saved whole, once they are settled."""

    def wait_for_save(self) -> None:
        """Copies are in order with the steps."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._worker is None:
            return None, None
        return self._worker.take_sent() or None, self._worker.take_received() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_failed() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return StepReport(target_version())

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()

    # In the scheduler.

    def on_new_request(self, request: Request) -> None:
        self._scheduler.begin(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        num_tokens = self._scheduler.num_promised_tokens(request, num_computed_tokens)
        return num_tokens, num_tokens > 0

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._scheduler.accept(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._scheduler.orders(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._scheduler.note(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finish(request, block_ids), None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    # In the API server.

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return KvStoreStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return KvStoreMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


# MultiConnector looks the class of its children's counters up by name, which a module path does not provide.
KVConnectorFactory.register_connector(PacelineKvStore.__name__, __name__, PacelineKvStore.__name__)
