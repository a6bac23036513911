"""Publisher: gate a candidate, write it, ask for its activation; and ask for the floor where the floor is better.

It never raises for a full disk, an absent gateway or a refusal: it says what happened and learning goes on.
"""

from __future__ import annotations

import logging
import uuid
from collections import Counter
from collections.abc import Sequence
from itertools import islice

from drafter.artifact import load_draft, publish_draft
from drafter.draft import Draft
from drafter.target import TargetParts
from learner.admin import AdminClient
from learner.config import GateSettings
from learner.evaluate import Evaluator, Score
from learner.gate import decide, paired_gain
from learner.replay import Replay
from learner.request import CapturedRequest
from wire.artifact import GateReport, TrainingReport
from wire.control import ActivateRequest
from wire.errors import ArtifactError, StaleExpectation, WireError
from wire.spec import CaptureSpec
from wire.store import DraftStore

log = logging.getLogger(__name__)


class Publisher:
    def __init__(
        self,
        store: DraftStore,
        client: AdminClient,
        evaluator: Evaluator,
        *,
        spec: CaptureSpec,
        target: TargetParts,
        settings: GateSettings,
        keep_versions: int,
    ) -> None:
        self._store, self._client, self._evaluator = store, client, evaluator
        self._spec, self._target = spec, target
        self._settings, self._keep_versions = settings, keep_versions
        self._drafts: dict[int, Draft] = {}
        self.num_published = 0
        self.last_gate: GateReport | None = None
        self.decisions: Counter[str] = Counter()
        self.simulated_al: float | None = None
        """Of the draft that serves, on the held-out requests of the last evaluation."""
        self.last_activated: int | None = None
        self.last_outcome = ""
        """In words: what became of the last evaluation."""

    def consider(self, candidate: Draft, training: TrainingReport, replay: Replay, active_version: int) -> str:
        """Evaluate, and publish and activate where the gate says so.

        Returns `waiting`, `accepted`, `rejected`, `floor`, `unusable`, `disk_error` or the gateway's refusal code.
        """
        recent = list(islice(reversed(list(replay.held_out)), self._settings.max_requests))
        if len(recent) < self._settings.min_holdout_requests:
            return self._conclude(
                "waiting", f"{len(recent)} of {self._settings.min_holdout_requests} held-out requests needed for a judgement"
            )
        incumbent = self._published(active_version)
        if incumbent is None:
            return self._conclude("unusable", f"the active draft {active_version} cannot be read, nothing to compare with")
        anchors = self._anchors(replay)
        before = self._evaluator.scores(incumbent, recent, active_version)
        before_anchors = self._evaluator.scores(incumbent, anchors, active_version)
        after = self._evaluator.scores(candidate, recent)
        after_anchors = self._evaluator.scores(candidate, anchors)
        report = decide(_list(after), _list(before), _list(after_anchors), _list(before_anchors), self._settings)
        self.last_gate = report
        self.simulated_al = report.incumbent_al
        self.decisions["accepted" if report.accepted else "rejected"] += 1
        floor = self._store.floor()
        self._evaluator.keep_only([v for v in (active_version, floor) if v is not None], [r.key for r in (*recent, *anchors)])
        if report.accepted:
            return self._publish(candidate, training, report, active_version)
        if floor is not None and floor != active_version and self._floor_wins(floor, before, recent):
            return self._activate(floor, active_version, force=True, outcome="floor")
        return self._conclude("rejected", report.reason)

    def _publish(self, candidate: Draft, training: TrainingReport, report: GateReport, active_version: int) -> str:
        try:
            version = publish_draft(
                self._store, candidate, self._spec, origin="learned", parent=active_version, training=training, gate=report
            )
        except OSError as error:
            return self._conclude("disk_error", f"cannot write a draft, training goes on: {error}")
        self.num_published += 1
        outcome = self._activate(version, active_version, force=False, outcome="accepted")
        if outcome == "accepted":
            self.last_activated = version
            self._drafts[version] = candidate
            self.simulated_al = report.candidate_al
        self._prune()
        return outcome

    def _activate(self, version: int, expected_active: int, *, force: bool, outcome: str) -> str:
        request = ActivateRequest(expected_active=expected_active, force=force)
        answer = self._client.activate(version, request, idempotency_key=f"learner-{version}-{uuid.uuid4().hex}")
        if answer.is_ok:
            return self._conclude(outcome, f"draft {version} serves instead of {expected_active}")
        if answer.code == StaleExpectation.code:
            return self._conclude(answer.code, f"draft {version} is forgotten: another draft became active meanwhile")
        return self._conclude(answer.code, f"draft {version} was not activated ({answer.code}): {answer.reason}")

    def _floor_wins(self, floor: int, active_scores: dict[str, Score], recent: Sequence[CapturedRequest]) -> bool:
        draft = self._published(floor)
        if draft is None:
            return False
        gain = paired_gain(
            self._evaluator.scores(draft, recent, floor),
            active_scores,
            confidence=self._settings.confidence,
            num_resamples=self._settings.num_resamples,
        )
        return gain.low > 0 and gain.mean >= self._settings.min_gain

    def _published(self, version: int) -> Draft | None:
        """A published draft, loaded once; None (logged) where it cannot be used."""
        if version not in self._drafts:
            try:
                self._drafts[version] = load_draft(self._store, version, self._spec, self._target)
            except (ArtifactError, WireError, OSError) as error:
                log.warning("cannot score draft %d: %s", version, error)
                return None
            keep = {version, self._store.floor()}
            self._drafts = {known: draft for known, draft in self._drafts.items() if known in keep}
        return self._drafts[version]

    def _anchors(self, replay: Replay) -> list[CapturedRequest]:
        limit = self._settings.max_anchors_per_domain
        return [request for group in replay.anchors.groups().values() for request in group[:limit]]

    def _prune(self) -> None:
        try:
            self._store.prune(self._keep_versions)
        except (OSError, ArtifactError) as error:
            log.warning("cannot remove old drafts: %s", error)

    def _conclude(self, outcome: str, reason: str) -> str:
        self.last_outcome = reason
        log.info("gate: %s: %s", outcome, reason)
        return outcome


def _list(scores: dict[str, Score]) -> list[Score]:
    return list(scores.values())
