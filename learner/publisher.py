"""Publisher: gate a candidate, write it, ask for its activation; and ask for the floor where the floor is better.

It never raises for a full disk, an absent gateway or a refusal: it says what happened and learning goes on.
"""

from __future__ import annotations

import logging
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice

from drafter.artifact import load_draft, publish_draft
from drafter.draft import Draft
from drafter.target import TargetParts
from learner.admin import AdminClient
from learner.config import GateSettings
from learner.evaluate import Evaluator, Score
from learner.gate import AnchorScores, decide, paired_gain
from learner.replay import Replay
from learner.request import CapturedRequest
from wire.artifact import GateReport, TrainingReport
from wire.control import ActivateRequest
from wire.errors import ArtifactError, StaleExpectation, WireError
from wire.spec import CaptureSpec
from wire.store import DraftStore

log = logging.getLogger(__name__)


class Publisher:
    """Owns the gate's evidence of drafts and the way to the gateway; learning owns the candidate."""

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
        groups = self._anchors(replay)
        anchors = [request for group in groups.values() for request in group]
        before = self._evaluator.scores(incumbent, recent, active_version)
        before_anchors = self._evaluator.scores(incumbent, anchors, active_version)
        after = self._evaluator.scores(candidate, recent)
        after_anchors = self._evaluator.scores(candidate, anchors)
        anchor_scores = [
            AnchorScores(name, _of(group, after_anchors), _of(group, before_anchors)) for name, group in groups.items()
        ]
        report = decide(after, before, anchor_scores, self._settings)
        self.last_gate = report
        self.simulated_al = report.incumbent_al
        self.decisions["accepted" if report.accepted else "rejected"] += 1
        floor = self._store.floor()
        self._evaluator.keep_only([v for v in (active_version, floor) if v is not None], [r.key for r in (*recent, *anchors)])
        if report.accepted:
            return self._publish(candidate, training, report, active_version)
        if floor is not None and floor != active_version and self._floor_wins(floor, before, recent):
            return self._return_to_floor(floor, active_version)
        return self._conclude("rejected", report.reason)

    def take_unscorable(self) -> list[CapturedRequest]:
        """Requests the last evaluations failed with."""
        return self._evaluator.take_unscorable()

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
            self._keep_loaded(version, candidate)
            self.simulated_al = report.candidate_al
        self._prune()
        return outcome

    def _return_to_floor(self, floor: int, active_version: int) -> str:
        outcome = self._activate(floor, active_version, force=True, outcome="floor")
        if outcome == "floor":
            self.last_activated = None  # its going was asked for here: nobody rolled it back
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
                self._keep_loaded(version, load_draft(self._store, version, self._spec, self._target))
            except (ArtifactError, WireError, OSError) as error:
                log.warning("cannot score draft %d: %s", version, error)
                return None
        return self._drafts[version]

    def _keep_loaded(self, version: int, draft: Draft) -> None:
        """Hold a published draft in memory, and beside it only the active one and the floor: each is a whole draft."""
        keep = {self._store.active(), self._store.floor()}
        self._drafts = {known: held for known, held in self._drafts.items() if known in keep} | {version: draft}

    def _anchors(self, replay: Replay) -> dict[str, list[CapturedRequest]]:
        limit = self._settings.max_anchors_per_domain
        return {name: requests[:limit] for name, requests in replay.anchors.groups().items()}

    def _prune(self) -> None:
        try:
            self._store.prune(self._keep_versions)
        except (OSError, ArtifactError) as error:
            log.warning("cannot remove old drafts: %s", error)

    def _conclude(self, outcome: str, reason: str) -> str:
        self.last_outcome = reason
        log.info("gate: %s: %s", outcome, reason)
        return outcome


def _of(requests: Sequence[CapturedRequest], scores: Mapping[str, Score]) -> dict[str, Score]:
    """The scores of these requests."""
    return {request.key: scores[request.key] for request in requests if request.key in scores}
