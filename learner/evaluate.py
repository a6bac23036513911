"""Evaluator: simulated AL of drafts on held-out requests, each request of each draft scored once.

Shape letters: A anchors, T rows, D hidden, U draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafter.accept import log_totals, simulate
from drafter.draft import Draft
from drafter.target import TargetParts
from learner.ranks import CPU
from learner.request import CapturedRequest

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Score:
    """One request under one draft: summed expected tokens per verify step over `num_anchors` judged anchors."""

    key: str
    total_length: float
    num_anchors: int
    prompt_key: str
    """Requests with the same prompt are one piece of evidence."""


class Evaluator:
    """Knows the target; remembers scores of drafts that were given a name (published versions do not change).

    Drafts come and stay in host memory; they are computed on `device`.
    """

    def __init__(
        self, target: TargetParts, depth: int, *, dtype: torch.dtype, max_context_rows: int, device: torch.device = CPU
    ) -> None:
        self._target = target
        self._depth = depth
        self._dtype, self._device = dtype, device
        self._max_context_rows = max_context_rows
        self._embedding_VD = target.embedding_VD.to(device, dtype)
        self._head_VD = target.head_VD.to(device, dtype)
        self._unscorable: dict[str, CapturedRequest] = {}
        self._known: dict[tuple[int, str], Score | None] = {}
        self._log_totals: dict[str, Tensor] = {}

    def scores(self, draft: Draft, requests: Sequence[CapturedRequest], version: int | None = None) -> dict[str, Score]:
        """Scores by request key, requests without a judged anchor left out. `version` names a published draft."""
        placed: Draft | None = None
        found: dict[str, Score | None] = {}
        for request in requests:
            known = (version, request.key) if version is not None else None
            if known is not None and known in self._known:
                found[request.key] = self._known[known]
                continue
            placed = placed or self._place(draft)
            found[request.key] = self._try_score(placed, request)
            if known is not None:
                self._known[known] = found[request.key]
        return {key: score for key, score in found.items() if score is not None}

    def remember(self, version: int, scores: Mapping[str, Score]) -> None:
        """The draft these scores were made of is published under that number."""
        self._known.update({(version, key): score for key, score in scores.items()})

    def knows(self, version: int, requests: Sequence[CapturedRequest]) -> bool:
        """Whether the published draft was scored on all these requests."""
        return all((version, request.key) in self._known for request in requests)

    def recall(self, version: int, requests: Sequence[CapturedRequest]) -> dict[str, Score]:
        """What is known of a published draft, by request key."""
        found = {request.key: self._known.get((version, request.key)) for request in requests}
        return {key: score for key, score in found.items() if score is not None}

    def take_unscorable(self) -> list[CapturedRequest]:
        """Requests whose scoring failed since the last call; whoever owns them takes them out."""
        taken = list(self._unscorable.values())
        self._unscorable.clear()
        return taken

    def keep_only(self, versions: Collection[int], keys: Collection[str]) -> None:
        """Forget scores of other versions and of requests that are held out no longer."""
        kept_versions, kept_keys = set(versions), set(keys)
        self._known = {known: s for known, s in self._known.items() if known[0] in kept_versions and known[1] in kept_keys}
        self._log_totals = {key: totals_T for key, totals_T in self._log_totals.items() if key in kept_keys}

    def _place(self, draft: Draft) -> Draft:
        core = draft.core if self._device == CPU else copy.deepcopy(draft.core).to(self._device)
        return Draft(core, draft.head.to(self._dtype, self._device))

    def _log_total(self, request: CapturedRequest) -> Tensor | None:
        """Kept by request: it costs more than the draft's own forward."""
        if request.rows.temperature <= 0:
            return None
        if request.key not in self._log_totals:
            self._log_totals[request.key] = log_totals(request.rows.hidden_TD, self._head_VD, request.rows.temperature)
        return self._log_totals[request.key]

    def _try_score(self, draft: Draft, request: CapturedRequest) -> Score | None:
        """None where the request cannot be computed: rows come from outside, and one of them must not end all learning."""
        if request.key in self._unscorable:
            return None
        try:
            return self._score(draft, request)
        except (RuntimeError, IndexError, ValueError, MemoryError) as error:
            log.warning("cannot score request %s: %s: %s", request.key, type(error).__name__, error)
            self._unscorable[request.key] = request
            return None

    def _score(self, draft: Draft, request: CapturedRequest) -> Score | None:
        result = simulate(
            draft.core,
            draft.head,
            self._embedding_VD,
            self._head_VD,
            request.rows,
            self._depth,
            self._dtype,
            self._max_context_rows,
            self._log_total(request),
        )
        if result is None or not bool(result.valid_A.any()):
            return None
        lengths_A = result.length_A[result.valid_A]
        if not bool(lengths_A.isfinite().all()):
            raise ValueError("its expected lengths are not finite")
        return Score(request.key, float(lengths_A.sum()), lengths_A.numel(), request.prompt_key)


def simulated_al(scores: Collection[Score]) -> float:
    """Mean length over all judged anchors, wherever a verify step would start; 1.0, that of no draft, without one."""
    anchors = sum(score.num_anchors for score in scores)
    return sum(score.total_length for score in scores) / anchors if anchors else 1.0
