"""Recovery: the last good state of training, in memory and on disk, and the way back to it when a step goes wrong.

Shape letters: V target vocabulary.
"""

from __future__ import annotations

import logging
from pathlib import Path

from torch import Tensor

from learner.checkpoint import Progress, load_checkpoint, not_finite, save_checkpoint
from learner.history import History
from learner.publisher import Publisher
from learner.replay import Replay
from learner.trainer import Trainer
from wire.spec import CaptureSpec

log = logging.getLogger(__name__)

_COUNTS = "counts_V"
_CLEAN_STEPS_BEFORE_FASTER = 200
_MIN_RATE_SCALE = 2.0**-10


class Recovery:
    """Keeps the trainer's state, and beside it the numbers of replay and publisher that a new process goes on from."""

    def __init__(
        self, directory: Path, spec: CaptureSpec, trainer: Trainer, replay: Replay, publisher: Publisher, history: History
    ) -> None:
        self._path = directory / "checkpoint.safetensors"
        self._spec = spec
        self._trainer, self._replay, self._publisher, self._history = trainer, replay, publisher, history
        self._good_state = trainer.tensors()
        self._num_clean_steps = 0
        """Since the last restore, or the last time the rate grew again."""
        self.num_restores = 0

    def resume(self) -> bool:
        """Go on from the checkpoint; False, and nothing changed, where there is none that fits."""
        loaded = load_checkpoint(self._path, self._spec)
        if loaded is None:
            return False
        tensors, progress = loaded
        try:
            counts_V = _fitting_counts(tensors.pop(_COUNTS), self._spec.vocab_size)
            self._trainer.load(tensors)
        except (KeyError, ValueError, RuntimeError) as error:
            log.warning("the checkpoint does not fit this draft, starting anew: %s", error)
            self._trainer.load(self._good_state)
            return False
        self._good_state = self._trainer.tensors()
        self._replay.counts_V.copy_(counts_V)
        self._replay.num_tokens_distinct = progress.num_tokens_distinct
        self._replay.restore_visits(progress.visits)
        self._trainer.num_steps, self._trainer.num_tokens_seen = progress.num_steps, progress.num_tokens_seen
        self._publisher.num_published = progress.num_published
        self._publisher.decisions.update(progress.num_gate_decisions)
        if progress.judged_against is not None and progress.wager is not None:
            self._publisher.judge.resume(progress.judged_against, progress.wager, progress.num_recounts, self._replay)
        self._publisher.warm.champions.update(progress.champions)
        self.num_restores = progress.num_restores
        return True

    def save(self) -> None:
        """Keep the present state in memory and on disk; a full disk is told, not raised."""
        state = self._trainer.tensors()
        broken = not_finite(state)
        if broken:
            self.restore(f"{broken[0]} is not finite", rate_factor=0.5)
        else:
            self._good_state = state
        progress = Progress(
            spec=self._spec,
            num_steps=self._trainer.num_steps,
            num_tokens_seen=self._trainer.num_tokens_seen,
            num_tokens_distinct=self._replay.num_tokens_distinct,
            num_published=self._publisher.num_published,
            num_restores=self.num_restores,
            num_gate_decisions=dict(self._publisher.decisions),
            visits=self._replay.visits(),
            judged_against=self._publisher.judge.against,
            wager=self._publisher.judge.ledger.wager,
            num_recounts=self._publisher.judge.num_recounts,
            champions=dict(self._publisher.warm.champions),
        )
        try:
            save_checkpoint(self._path, self._good_state | {_COUNTS: self._replay.counts_V}, progress)
        except OSError as error:
            log.warning("no checkpoint, training goes on: %s", error)
            self._history.write("checkpoint_error", reason=str(error))

    def restore(self, reason: str, *, rate_factor: float) -> None:
        """Back to the last good state, for a step that failed may have changed half of the weights; the rate times `rate_factor`."""
        optimiser = self._trainer.optimiser
        scale = max(optimiser.rate_scale * rate_factor, _MIN_RATE_SCALE)
        self._trainer.load(self._good_state)
        optimiser.rate_scale = scale
        self.num_restores += 1
        self._num_clean_steps = 0
        log.warning("a training step failed (%s); restored the last checkpoint, rate scale is now %g", reason, scale)
        self._history.write("restore", reason=reason, rate_scale=scale)

    def note_clean_step(self) -> None:
        """Enough clean steps in a row give back half of what a restore took of the rate."""
        optimiser = self._trainer.optimiser
        self._num_clean_steps += 1
        if optimiser.rate_scale < 1.0 and self._num_clean_steps >= _CLEAN_STEPS_BEFORE_FASTER:
            optimiser.rate_scale = min(optimiser.rate_scale * 2, 1.0)
            self._num_clean_steps = 0
            log.info("training is steady again, rate scale is now %g", optimiser.rate_scale)


def _fitting_counts(counts_V: Tensor, vocab_size: int) -> Tensor:
    """The counts [V] of a checkpoint; raises ValueError for any other tensor."""
    if tuple(counts_V.shape) != (vocab_size,) or bool((counts_V < 0).any()):
        raise ValueError(f"{_COUNTS} of shape {tuple(counts_V.shape)} are no token counts of a vocabulary of {vocab_size}")
    return counts_V
