"""A worker that fails half-way through loading a draft when a file asks for it: the fault behind the roll-back test."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from server.engine.settings import parts_config
from server.engine.worker_cpu import PacelineCpuWorker

FAULT_FILE = "fail-next-apply"


class FaultyCpuWorker(PacelineCpuWorker):
    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        super().load_model(load_dummy_weights=load_dummy_weights)
        fault = parts_config().state_dir / FAULT_FILE
        draft = self.get_draft_model()
        load_weights = draft.load_weights

        def load_half(weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
            if not fault.exists():
                return load_weights(weights)
            fault.unlink()
            listed = list(weights)
            load_weights(iter(listed[: len(listed) // 2]))
            raise RuntimeError("injected fault half-way through the load")

        draft.load_weights = load_half
