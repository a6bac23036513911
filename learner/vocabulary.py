"""The choice of the draft vocabulary while training goes on, and whether its size is enough.

Shape letters: D hidden, V target vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import Tensor

from drafter.head import Head
from drafter.vocabulary import WANTED_COVERAGE, better_vocabulary, coverage, wanted_size
from learner.history import History
from learner.replay import Replay
from learner.trainer import Trainer
from wire.control import DomainCoverage

log = logging.getLogger(__name__)

_FEWEST_TOKENS = 2000
"""Of a domain, before its coverage is sure enough to say that the vocabulary is too small: 98 % give or take 1 %, as requests
are alike in themselves. Of all domains, before a size is named at all."""


class VocabularyChoice:
    """A new map reaches the engines with the next draft that the gate lets through, never by itself."""

    def __init__(self, control_ids: Sequence[int], target_head_VD: Tensor, min_gain: float) -> None:
        self._control_ids, self._target_head_VD, self._min_gain = control_ids, target_head_VD, min_gain
        self.wanted_size: int | None = None
        """Tokens that can be expected to cover enough of every domain; None until enough was seen to tell."""
        self.shortfall = ""
        """Why the size is too small; empty where it is not."""

    def refresh(self, trainer: Trainer, replay: Replay, history: History, live: Sequence[DomainCoverage]) -> None:
        """Train against another map where the traffic asks for other tokens. The core does not depend on it.

        `live` is the coverage of what arrived lately.
        """
        head, counts_V = trainer.head, replay.counts_V
        domains = [*replay.domain_tokens().values()]
        num_seen = sum(int(tokens.counts_V.sum()) for tokens in domains)
        is_telling = num_seen >= _FEWEST_TOKENS
        self.wanted_size = wanted_size(self._control_ids, domains, counts_V.numel()) if is_telling else None
        self._judge_size(live, head.vocabulary.ids_U.numel())
        if not head.is_target_rows:
            return
        domain_counts = [tokens.counts_V for tokens in domains]
        chosen = better_vocabulary(counts_V, self._control_ids, head.vocabulary, self._min_gain, domain_counts)
        if chosen is not None:
            trainer.set_head(Head.of_target(chosen, self._target_head_VD))
            covered = coverage(counts_V, chosen)
            history.write("vocabulary", coverage=covered, gain=covered - coverage(counts_V, head.vocabulary))

    def _judge_size(self, live: Sequence[DomainCoverage], present: int) -> None:
        """Engines are built for one size, so a larger one is for whoever starts them to give.

        Where enough is covered the size does, whatever the estimate; where it is not and the estimate is no larger, another map will.
        """
        before = self.shortfall
        worst = min((one for one in live if one.num_tokens >= _FEWEST_TOKENS), key=lambda one: one.share, default=None)
        self.shortfall = ""
        if self.wanted_size is None or worst is None:
            return
        if worst.share < WANTED_COVERAGE and self.wanted_size > present:
            self.shortfall = (
                f"{present} draft tokens cover {worst.share:.1%} of what the target says to {worst.tenant} in {worst.domain}, about "
                f"{self.wanted_size} would cover {WANTED_COVERAGE:.0%}: start again with --set draft.vocab_size={self.wanted_size}, drafts keep what "
                "they learned"
            )
        if self.shortfall and not before:
            log.warning("%s", self.shortfall)
