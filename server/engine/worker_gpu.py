"""The worker class of CUDA engines: `--worker-cls server.engine.worker_gpu.PacelineGpuWorker`."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from server.engine.worker import PacelineWorker


class PacelineGpuWorker(PacelineWorker, Worker):
    """vLLM's GPU worker with Paceline's parts."""
