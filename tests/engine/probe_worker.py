"""A worker for tests: fails half-way through loading a model when asked to, keeps the draft's last logits, counts its forwards,
takes other targets."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from server.engine import kv_store_dfkv
from server.engine.settings import parts_config
from server.engine.stage import Stage, read_weights
from server.engine.weights import TARGET
from server.engine.worker_cpu import PacelineCpuWorker
from wire.store import DraftStore

# One process with the scheduler, whose patience a busy machine must not decide.
kv_store_dfkv.ANSWER_S = float(os.environ.get("PROBE_DFKV_ANSWER_S", kv_store_dfkv.ANSWER_S))


class ProbeCpuWorker(PacelineCpuWorker):
    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        if "PROBE_ACTIVATE_WHILE_LOADING" in os.environ:
            self._activate_while_loading(int(os.environ["PROBE_ACTIVATE_WHILE_LOADING"]))
        super().load_model(load_dummy_weights=load_dummy_weights)
        self._failing: set[str] = set()
        """Models whose next load fails half-way."""
        self._draft_logits: list[torch.Tensor] = []
        draft, target = self.get_draft_model(), self.get_model()
        draft.load_weights = self._load_half(draft.load_weights, "draft")
        target.load_weights = self._load_half(target.load_weights, "target")
        compute_logits = draft.compute_logits

        def keep_logits(hidden_states: torch.Tensor) -> torch.Tensor:
            logits = compute_logits(hidden_states)
            self._draft_logits.append(logits[0].clone())
            return logits

        draft.compute_logits = keep_logits
        self._draft_work = {"forwards": 0, "rows": 0, "questions": 0}
        forward = draft.forward

        def count_forward(input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self._draft_work["forwards"] += 1
            self._draft_work["rows"] += len(input_ids)
            return forward(input_ids, *args, **kwargs)

        draft.forward = count_forward

    def _activate_while_loading(self, version: int) -> None:
        load_model = self.model_runner.load_model

        def load(**options: Any) -> None:
            load_model(**options)
            DraftStore(parts_config().state_dir).set_active(version)

        self.model_runner.load_model = load

    def probe_update_target(self, version: int, directory: str) -> None:
        """Put other target weights under the engine, whatever it runs: no pause, no checks, no way back."""
        stage, theirs = Stage(lambda _: read_weights(Path(directory))), self._weights.stages[TARGET]
        for held in (self._weights.versions[TARGET], version):
            stage.load_now(held)
        self._weights.stages[TARGET] = stage
        try:
            self._swap(TARGET, version)
        finally:
            self._weights.stages[TARGET] = theirs

    def _load_half(self, load_weights: Callable[..., Any], model: str) -> Callable[..., Any]:
        def load(weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
            if model not in self._failing:
                return load_weights(weights)
            self._failing.remove(model)
            listed = list(weights)
            load_weights(iter(listed[: len(listed) // 2]))
            raise RuntimeError("injected fault half-way through the load")

        return load

    def probe_fail_next_load(self) -> bool:
        self._failing.add("draft")
        return True

    def probe_fail_next_target_load(self) -> bool:
        self._failing.add("target")
        return True

    def take_draft_token_ids(self) -> Any:
        self._draft_work["questions"] += 1
        return super().take_draft_token_ids()

    def probe_take_draft_work(self) -> dict[str, int]:
        """Since the last call: the draft's forwards, their rows, and how often the core asked for proposals."""
        taken, self._draft_work = self._draft_work, dict.fromkeys(self._draft_work, 0)
        return taken

    def probe_take_draft_logits(self) -> list[list[float]]:
        """Logits of the first request of each draft forward since the last call, -inf as -1e30."""
        taken, self._draft_logits = self._draft_logits, []
        return [logits.clamp(min=-1e30).tolist() for logits in taken]
