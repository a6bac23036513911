"""The CPU worker with the KV store told where the target's version is kept."""

from __future__ import annotations

from server.engine.kv_store_version import follow_target_version
from server.engine.weights import TARGET
from server.engine.worker_cpu import PacelineCpuWorker


class StoreCpuWorker(PacelineCpuWorker):
    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        super().load_model(load_dummy_weights=load_dummy_weights)
        follow_target_version(lambda: self._weights.versions[TARGET])
