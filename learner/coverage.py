"""Coverage: how much of what the target says the draft that serves can propose at all, domain by domain.

Each request is judged as it arrives, before anything was chosen by it: a map covers the tokens it was chosen by better than others.
What is counted are emitted tokens, which are the target's best ones at temperature 0; sampled ones are covered a little less.

Shape letters: V target vocabulary.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor

from drafter.artifact import read_vocabulary
from learner.replay import emitted_tokens
from learner.request import CapturedRequest
from wire.control import DomainCoverage
from wire.errors import ArtifactError
from wire.store import DraftStore

log = logging.getLogger(__name__)

_MEMORY_TOKENS = 5000
"""Of one domain: what is so much older counts half."""


@dataclass
class _Domain:
    tenant: str
    domain: str
    num_covered: float = 0.0
    num_tokens: float = 0.0


class CoverageMeter:
    """Of at most `max_domains` domains, those that were asked of last."""

    def __init__(self, store: DraftStore, max_domains: int) -> None:
        self._store, self._max_domains = store, max_domains
        self._domains: OrderedDict[str, _Domain] = OrderedDict()
        self._version: int | None = None
        self._is_proposable_V: Tensor | None = None
        self.view: tuple[DomainCoverage, ...] = ()
        """Replaced as a whole, so that another thread may read it."""

    def note(self, request: CapturedRequest, active_version: int) -> None:
        """Take in a request that has just arrived. Without a readable map of the active draft nothing is measured."""
        is_proposable_V = self._map_of(active_version)
        tokens = emitted_tokens(request)
        if is_proposable_V is None or tokens.numel() == 0:
            return
        domain = self._domains.setdefault(request.group, _Domain(request.tenant, request.domain))
        self._domains.move_to_end(request.group)
        if len(self._domains) > self._max_domains:
            self._domains.popitem(last=False)
        kept = 0.5 ** (tokens.numel() / _MEMORY_TOKENS)
        domain.num_covered = kept * domain.num_covered + float(is_proposable_V[tokens].sum())
        domain.num_tokens = kept * domain.num_tokens + tokens.numel()
        self.view = tuple(
            DomainCoverage(
                tenant=one.tenant, domain=one.domain, share=one.num_covered / one.num_tokens, num_tokens=one.num_tokens
            )
            for one in self._domains.values()
        )

    def _map_of(self, version: int) -> Tensor | None:
        """Which target tokens a draft can propose [V]; a map that cannot be read is not tried again."""
        if version != self._version:
            self._version = version
            try:
                vocabulary = read_vocabulary(self._store, version)
                self._is_proposable_V = torch.zeros(vocabulary.vocab_size, dtype=torch.bool)
                self._is_proposable_V[vocabulary.ids_U] = True
            except ArtifactError as error:
                log.warning("coverage of draft %d is not known: %s", version, error)
                self._is_proposable_V = None
        return self._is_proposable_V
