"""The worker class of CPU engines: `--worker-cls server.engine.worker_cpu.PacelineCpuWorker`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.worker.cpu_worker import CPUWorker

from server.engine.affinity import threads_off_compute_cores
from server.engine.worker import PacelineWorker

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


class PacelineCpuWorker(PacelineWorker, CPUWorker):
    """vLLM's CPU worker with Paceline's parts."""

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """NIXL starts here: its threads would inherit the compute cores, and it moves this thread to the machine's last core."""
        with threads_off_compute_cores():
            super().initialize_from_config(kv_cache_config)
