"""PublishedDrafts: drafts of the store as the gate sees them, by version: loaded when there is something to score."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from drafter.artifact import load_draft
from drafter.draft import Draft
from drafter.target import TargetParts
from learner.evaluate import Evaluator, Score
from learner.request import CapturedRequest
from wire.errors import ArtifactError, WireError
from wire.spec import CaptureSpec
from wire.store import DraftStore

log = logging.getLogger(__name__)


class PublishedDrafts:
    """Few drafts stay in memory, for each is a whole one: the active one, the floor and the one used last. Scores stay longer."""

    def __init__(self, store: DraftStore, evaluator: Evaluator, spec: CaptureSpec, target: TargetParts) -> None:
        self._store, self._evaluator, self._spec, self._target = store, evaluator, spec, target
        self._held: dict[int, Draft] = {}

    def fits(self, version: int) -> bool:
        """Whether the engines of this system can load it: not after their draft was given another size."""
        try:
            return self._store.manifest(version).spec == self._spec
        except ArtifactError:
            return False

    def scores(self, version: int, requests: Sequence[CapturedRequest]) -> dict[str, Score] | None:
        """Scores by request key; None (logged) where the draft cannot be used."""
        if self._evaluator.knows(version, requests):
            return self._evaluator.recall(version, requests)
        draft = self._load(version)
        return None if draft is None else self._evaluator.scores(draft, requests, version)

    def hold(self, version: int, draft: Draft) -> None:
        """Keep this draft in memory until another one is wanted."""
        keep = {self._store.active(), self._store.floor()}
        self._held = {known: held for known, held in self._held.items() if known in keep} | {version: draft}

    def _load(self, version: int) -> Draft | None:
        if version not in self._held:
            try:
                self.hold(version, load_draft(self._store, version, self._spec, self._target))
            except (ArtifactError, WireError, OSError) as error:
                log.warning("cannot score draft %d: %s", version, error)
                return None
        return self._held[version]
