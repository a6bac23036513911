"""The probe worker with the KV store told where the target's version is kept."""

from __future__ import annotations

from probe_worker import ProbeCpuWorker

from server.engine.kv_store_version import follow_target_version
from server.engine.weights import TARGET


class StoreCpuWorker(ProbeCpuWorker):
    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        super().load_model(load_dummy_weights=load_dummy_weights)
        follow_target_version(lambda: self._weights.versions[TARGET])
