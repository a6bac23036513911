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
        self.draft: torch.nn.Module | None = None
        """Shares the target's embedding; None until the worker has loaded it."""

    def attach(self, kind: str, stage: Stage, version: int) -> None:
        """Name the staging area of a model and the version it was started with."""
        self.stages[kind] = stage
        self.versions[kind] = version
        stage.protect = {version}

    def sha256(self, kind: str) -> str:
        """Of the file whose tensors are in force; empty where no checksum is known."""
        held = self.stages[kind].get(self.versions[kind])
        return held.sha256 if held is not None else ""

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
        if in_force is None:
            raise SwapError(f"{kind} {self.versions[kind]}, the way back, is not held on this worker; stage {version} again")
        started_s = time.perf_counter()
        guard = SharedEmbedding(self._default_model)
        try:
            self._apply(kind, incoming)
            self._check(kind, guard)
        except Exception as error:
            self._restore(kind, in_force, guard)
            raise SwapError(
                f"{kind} {version} failed while being applied ({error}); {kind} {self.versions[kind]} is back in force"
            ) from error
        # The one before stays at hand: where another rank or engine fails, this one goes back.
        stage.protect = {version, self.versions[kind]}
        self.versions[kind] = version
        self.apply_ms = (time.perf_counter() - started_s) * 1e3

    def _restore(self, kind: str, in_force: StagedWeights, guard: SharedEmbedding) -> None:
        """Put the weights in force back. Where that fails this process ends: it must not serve from weights it cannot name."""
        try:
            # Close the interrupted reload first: a second one on top of it would meet half-wrapped parameters.
            finalize_layerwise_reload(self.model, self.model_config)
            self._apply(kind, in_force)
            self._check(kind, guard)
        except Exception:
            logger.critical("the %s in force cannot be restored; this engine ends and starts anew", kind, exc_info=True)
            logging.shutdown()
            os._exit(EXIT_UNKNOWN_WEIGHTS)

    def _check(self, kind: str, guard: SharedEmbedding) -> None:
        """Raises SwapError where draft and target do not share what they must, and only that."""
        if kind == DRAFT:
            guard.check_unchanged()
            guard.check_shared(self.model)
        elif self.draft is not None:
            guard.check_shared(self.draft)

    def _apply(self, kind: str, weights: StagedWeights) -> None:
        initialize_layerwise_reload(self.model)
        self.model.load_weights(iter(weights.tensors.items()))
        finalize_layerwise_reload(self.model, self.model_config)
        if kind == TARGET and self.device.type == "cpu":
            refresh_tied_heads(self.model)


class SharedEmbedding:
    """Proof, cheap enough for every commit, that a swap left the target's embedding where it was, a draft's swap also what it was.

    The embedding is the one module a draft shares with the target: a new target's is the draft's at once. Full digests over all
    weights are `digest.py`.
    """

    def __init__(self, target: torch.nn.Module) -> None:
        self._target = target
        weight = embedding(target)
        self._pointer, self._sample = weight.data_ptr(), _sample(weight)

    def check_unchanged(self) -> None:
        """Raises SwapError."""
        weight = embedding(self._target)
        if weight.data_ptr() != self._pointer or not torch.equal(_sample(weight), self._sample):
            raise SwapError("the swap changed the target's embedding")

    def check_shared(self, draft: torch.nn.Module) -> None:
        """Raises SwapError."""
        if embedding(self._target).data_ptr() != self._pointer or embedding(draft).data_ptr() != self._pointer:
            raise SwapError("the swap moved the embedding that the draft shares with the target")
        if draft.lm_head is getattr(self._target, "lm_head", None):
            raise SwapError("the draft shares the target's lm_head; it must have its own, smaller one")


def embedding(model: torch.nn.Module) -> torch.Tensor:
    """Weight of a target's or a draft's input embedding."""
    module = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else model.model.embed_tokens
    weight: torch.Tensor = module.weight
    return weight


def _sample(weight: torch.Tensor) -> torch.Tensor:
    flat = weight.detach().reshape(-1)
    return flat[:: max(flat.numel() // _NUM_SAMPLES, 1)].clone()
