"""PacelineWorker: what Paceline adds to a vLLM worker, as a mixin for the CPU and the GPU worker class.

RPC methods are named `paceline_*`, run between two steps, and return plain data. Refusals are data too: an exception
would reach the caller as a bare string.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from vllm.distributed import nixl_utils
from vllm.distributed.parallel_state import get_tp_group

from server.engine import mends
from server.engine.capture import Capture
from server.engine.digest import model_digest, quick_digest
from server.engine.draft_backlog import DraftBacklog
from server.engine.kv_layout import kv_layout
from server.engine.kv_store_version import follow_target_version
from server.engine.pin import require_pinned_vllm
from server.engine.settings import parts_config
from server.engine.stage import DraftLoader, Stage
from server.engine.stage_target import MAX_HELD, TargetLoader
from server.engine.weights import DRAFT, EXIT_UNKNOWN_WEIGHTS, TARGET, PacelineWeightEngine
from wire.errors import ConfigError, PacelineError, StaleExpectation
from wire.spec import CaptureSpec, resolve_capture_spec
from wire.store import DraftStore
from wire.target import BASE_VERSION, TargetStore

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker as _Base
else:
    _Base = object

Answer = dict[str, Any]

logger = logging.getLogger(__name__)


class PacelineWorker(_Base):
    """Loads the parts right after the models, before the first step."""

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Raises ConfigError where this engine could not work with Paceline."""
        require_pinned_vllm()
        config = parts_config()
        self._mends = self._mend()
        store = DraftStore(config.state_dir)
        before = store.active()
        super().load_model(load_dummy_weights=load_dummy_weights)
        if before is None:
            raise ConfigError(f"no draft is active in {config.state_dir}; start engines with `paceline up`")
        self._spec = self._resolve_spec()
        self._install_weights(store, before)
        self._follow_active(store)
        follow_target_version(lambda: self._weights.versions[TARGET])
        # Before the capture, whose clock so counts what is put off in the step that makes up for it.
        self._backlog = DraftBacklog(self.model_runner) if DraftBacklog.suits(self.model_runner) else None
        self._capture = Capture(
            self.model_runner,
            config,
            self._spec,
            self.speculative_config.num_speculative_tokens,
            lambda: (self._weights.versions[DRAFT], self._weights.versions[TARGET]),
            publishes=get_tp_group().rank_in_group == 0,
        )

    def shutdown(self) -> None:
        if hasattr(self, "_capture"):
            self._capture.close()
        super().shutdown()

    def paceline_status(self) -> Answer:
        return {
            "worker": {
                "rank": self.rank,
                "pid": os.getpid(),
                "runner": self._capture.runner_name,
                "parts": ["capture", "weights", *(["draft_backlog"] if self._backlog else []), *self._mends],
                "draft_version": self._weights.versions[DRAFT],
                "target_version": self._weights.versions[TARGET],
                "staged_versions": self._weights.stages[DRAFT].versions(),
                "capture_rate": self._capture.rate,
                "staged_target_versions": self._weights.stages[TARGET].versions(),
            },
            "epoch": self._capture.epoch,
            "spec": self._spec,
            "num_speculative_tokens": self.speculative_config.num_speculative_tokens,
            "kv": kv_layout(self.model_runner.kv_cache_config, self.vllm_config),
        }

    def paceline_stage(self, kind: str, version: int) -> Answer:
        """Begin to stage a `draft` or a `target` in the background."""
        self._weights.stages[kind].begin(version)
        return {}

    def paceline_stage_outcome(self, kind: str, version: int) -> Answer:
        try:
            return {"staged": self._weights.stages[kind].outcome(version)}
        except PacelineError as error:
            return _refusal(error)

    def paceline_commit(self, version: int, expected_active: int) -> Answer:
        """Swap a staged draft in, if the active one is the one expected."""
        return self._commit(DRAFT, version, expected_active)

    def paceline_commit_target(self, version: int, expected_active: int) -> Answer:
        """The same of the target. To be called while nothing runs and no KV is left."""
        return self._commit(TARGET, version, expected_active)

    def _commit(self, kind: str, version: int, expected_active: int) -> Answer:
        active = self._weights.versions[kind]
        try:
            if active != expected_active:
                raise StaleExpectation(f"{kind} {active} is active, not {expected_active}; read /admin/status and decide anew")
            if version != active:
                self._swap(kind, version)
        except PacelineError as error:
            return _refusal(error)
        apply_ms = self._weights.apply_ms if version != active else 0.0
        return {"version": version, "previous": active, "apply_ms": apply_ms, "sha256": self._weights.sha256(kind)}

    def paceline_set_capture(self, rate: float) -> Answer:
        self._capture.set_rate(rate)
        return {"rate": self._capture.rate}

    def paceline_digest(self) -> Answer:
        """Functional digests of this rank's share of both models."""
        dtype, device = self.model_config.dtype, self.device
        return {
            "target": model_digest(self.get_model(), dtype, device),
            "draft": model_digest(self.get_draft_model(), dtype, device),
        }

    def paceline_target_digest(self) -> Answer:
        """Of this rank's share. All ranks have to be asked at once: they compute together."""
        return {"digest": quick_digest(self.get_model(), self.model_config.dtype, self.device)}

    def paceline_give_up(self) -> None:
        """End this process, and the engine with it: its ranks compute with different weights."""
        logger.critical("the ranks of this engine cannot be brought to one target; it ends and starts anew")
        logging.shutdown()
        os._exit(EXIT_UNKNOWN_WEIGHTS)

    def _swap(self, kind: str, version: int) -> None:
        """The three official calls in one RPC."""
        (self.start_draft_weight_update if kind == DRAFT else self.start_weight_update)()
        self.update_weights({"kind": kind, "version": version})
        self.finish_weight_update()

    def _mend(self) -> list[str]:
        if self.device_config.device_type != "cpu":
            return []
        mends.mend_expand_batch_to_tokens()
        mends.mend_top_k_of_no_rows()
        mends.mend_loading_of_compiled_models()
        mends.mend_waiting_without_a_core()
        in_force = [
            *(mends.MEND_EXPAND, mends.MEND_TOP_K, mends.MEND_COMPILED),
            *(mends.MEND_WAITING, mends.MEND_SEEDED, mends.MEND_TIED_HEAD),
        ]
        if self.vllm_config.kv_transfer_config is not None and nixl_utils.is_nixl_available():
            mends.mend_nixl_progress_thread()
            in_force.append(mends.MEND_NIXL)
        return in_force

    def _resolve_spec(self) -> CaptureSpec:
        """The spec of this engine's files, checked against what vLLM really loaded; raises ConfigError."""
        config = parts_config()
        spec = resolve_capture_spec(
            config.target_dir,
            dtype=str(self.model_config.dtype).removeprefix("torch."),
            draft_vocab_size=config.draft_vocab_size,
            aux_layer_ids=config.aux_layer_ids,
        )
        draft = self.speculative_config.draft_model_config.hf_config
        loaded = {
            "hidden_size": self.model_config.get_hidden_size(),
            "vocab_size": self.model_config.get_vocab_size(),
            "draft_vocab_size": draft.draft_vocab_size,
            "aux_layer_ids": tuple(draft.eagle_aux_hidden_state_layer_ids),
        }
        for name, value in loaded.items():
            if getattr(spec, name) != value:
                raise ConfigError(f"{name} is {getattr(spec, name)} in the configuration and {value} in the loaded models")
        return spec

    def _follow_active(self, store: DraftStore) -> None:
        """Where another draft was activated during the load, either may have been read: the newest is put in force whole."""
        while (active := store.active()) not in (None, self._weights.versions[DRAFT]):
            self._weights.stages[DRAFT].load_now(active)
            self._swap(DRAFT, active)

    def _install_weights(self, store: DraftStore, active: int) -> None:
        engine = self.weight_transfer_engine
        if not isinstance(engine, PacelineWeightEngine):
            raise ConfigError("the weight-transfer backend is not `paceline`; start engines with `paceline up`")
        loader = DraftLoader(store, self._spec)
        stage = Stage(loader)
        loader.reference = stage.load_now(active)
        engine.attach(DRAFT, stage, active)
        config = parts_config()
        target_loader = TargetLoader(TargetStore(config.state_dir), self._spec, config.target_dir)
        # Nothing is read before a first version is staged: most systems never change their target.
        engine.attach(TARGET, Stage(target_loader, kind=TARGET, max_held=MAX_HELD), BASE_VERSION)
        engine.draft = self.get_draft_model()
        self._weights = engine


def _refusal(error: PacelineError) -> Answer:
    return {"error": {"code": error.code, "message": str(error)}}
