"""The choice of the draft vocabulary while training goes on, and whether its size is enough.

Shape letters: D hidden, V target vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import Tensor

from drafter.head import Head
from drafter.vocabulary import better_vocabulary, coverage, wanted_size
from learner.history import History
from learner.replay import Replay
from learner.trainer import Trainer

log = logging.getLogger(__name__)


class VocabularyChoice:
    """A new map reaches the engines with the next draft that the gate lets through, never by itself."""

    def __init__(self, control_ids: Sequence[int], target_head_VD: Tensor, min_gain: float) -> None:
        self._control_ids, self._target_head_VD, self._min_gain = control_ids, target_head_VD, min_gain
        self.wanted_size = 0
        """Tokens that cover enough of what is remembered of every domain; the least that is needed."""

    def refresh(self, trainer: Trainer, replay: Replay, history: History) -> None:
        """Train against another map where the traffic asks for other tokens. The core does not depend on it."""
        head, counts_V = trainer.head, replay.counts_V
        domain_counts = [*replay.domain_counts().values()]
        self._want(wanted_size(self._control_ids, domain_counts, counts_V.numel()), head.vocabulary.ids_U.numel())
        if not head.is_target_rows:
            return
        chosen = better_vocabulary(counts_V, self._control_ids, head.vocabulary, self._min_gain, domain_counts)
        if chosen is not None:
            trainer.set_head(Head.of_target(chosen, self._target_head_VD))
            covered = coverage(counts_V, chosen)
            history.write("vocabulary", coverage=covered, gain=covered - coverage(counts_V, head.vocabulary))

    def _want(self, size: int, present: int) -> None:
        """Engines are built for one size, so a larger one is for whoever starts them to give."""
        if size > present >= self.wanted_size:
            log.warning(
                "%d draft tokens cover less than 98 %% of what the target says in some domain, %d would do: start again with "
                "--set draft.vocab_size=%d, drafts keep what they learned",
                present,
                size,
                size,
            )
        self.wanted_size = size
