"""PacelineWeightEngine: swaps staged weights into a live model within one RPC, and puts the old ones back if that fails.

Registered under vLLM's weight-transfer factory. The three official calls run in one worker RPC, so no step ever sees a
half-loaded model: while the layerwise reload runs, the embeddings a draft shares with the target are on `meta`.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from server.engine.mends import refresh_tied_heads
from server.engine.stage import Stage, StagedWeights
from wire.errors import SwapError

DRAFT = "draft"
TARGET = "target"
EXIT_UNKNOWN_WEIGHTS = 70
"""EX_SOFTWARE of sysexits.h."""
_NUM_SAMPLES = 4096

logger = logging.getLogger(__name__)


@dataclass
class InitInfo:
    """Nothing to initialise: weights arrive through staging."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Which staged version goes into which model."""

    kind: str = DRAFT
    version: int = -1


class PacelineWeightEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """`versions[kind]` is the version in force: set here, where weights change, and read by the capture."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.versions: dict[str, int] = {DRAFT: 0, TARGET: 0}
        self.stages: dict[str, Stage] = {}
        self.apply_ms = 0.0

    def attach(self, kind: str, stage: Stage, version: int) -> None:
        """Name the staging area of a model and the version it was started with."""
        self.stages[kind] = stage
        self.versions[kind] = version
        stage.protect = {version}

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        pass  # nothing may go to `meta` before the data is at hand

    def finish_weight_update(self) -> None:
        pass

    def shutdown(self) -> None:
        pass

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Apply a staged version; on any failure restore the one in force and raise SwapError."""
        kind, version = update_info.kind, update_info.version
        stage = self.stages[kind]
        incoming, in_force = stage.get(version), stage.get(self.versions[kind])
        if incoming is None:
            raise SwapError(f"{kind} {version} is not staged on this worker; stage it first")
        started_s = time.perf_counter()
        guard = SharedEmbedding(self._default_model) if kind == DRAFT else None
        try:
            self._apply(kind, incoming)
            if guard is not None:
                guard.check(self.model)
        except Exception as error:
            self._restore(kind, in_force, guard)
            raise SwapError(
                f"{kind} {version} failed while being applied ({error}); {kind} {self.versions[kind]} is back in force"
            ) from error
        # The one before stays at hand: where another rank or engine fails, this one goes back.
        stage.protect = {version, self.versions[kind]}
        self.versions[kind] = version
        self.apply_ms = (time.perf_counter() - started_s) * 1e3

    def _restore(self, kind: str, in_force: StagedWeights | None, guard: SharedEmbedding | None) -> None:
        """Put the weights in force back. Where that fails this process ends: it must not serve from weights it cannot name."""
        try:
            if in_force is None:
                raise SwapError("the weights in force are not held on this worker")
            # Close the interrupted reload first: a second one on top of it would meet half-wrapped parameters.
            finalize_layerwise_reload(self.model, self.model_config)
            self._apply(kind, in_force)
            if guard is not None:
                guard.check(self.model)
        except Exception:
            logger.critical("the %s in force cannot be restored; this engine ends and starts anew", kind, exc_info=True)
            logging.shutdown()
            os._exit(EXIT_UNKNOWN_WEIGHTS)

    def _apply(self, kind: str, weights: StagedWeights) -> None:
        initialize_layerwise_reload(self.model)
        self.model.load_weights(iter(weights.tensors.items()))
        finalize_layerwise_reload(self.model, self.model_config)
        if kind == TARGET and self.device.type == "cpu":
            refresh_tied_heads(self.model)


class SharedEmbedding:
    """Proof, cheap enough for every commit, that a draft swap left the target's embedding where and what it was.

    The embedding is the one module a draft shares with the target. Full digests over all weights are `digest.py`.
    """

    def __init__(self, target: torch.nn.Module) -> None:
        self._target = target
        self._pointer, self._sample = self._look()

    def check(self, draft: torch.nn.Module) -> None:
        """Raises SwapError."""
        pointer, sample = self._look()
        if pointer != self._pointer or not torch.equal(sample, self._sample):
            raise SwapError("the swap changed the target's embedding")
        if draft.lm_head is getattr(self._target, "lm_head", None):
            raise SwapError("the draft shares the target's lm_head; it must have its own, smaller one")

    def _look(self) -> tuple[int, torch.Tensor]:
        weight = (
            self._target.get_input_embeddings().weight
            if hasattr(self._target, "get_input_embeddings")
            else self._target.model.embed_tokens.weight
        )
        flat = weight.detach().reshape(-1)
        stride = max(flat.numel() // _NUM_SAMPLES, 1)
        return weight.data_ptr(), flat[::stride].clone()
