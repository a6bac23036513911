"""The worker class of CPU engines: `--worker-cls server.engine.worker_cpu.PacelineCpuWorker`."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from server.engine.worker import PacelineWorker


class PacelineCpuWorker(PacelineWorker, CPUWorker):
    """vLLM's CPU worker with Paceline's parts."""
