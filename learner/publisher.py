"""Publisher: have a candidate judged, write it, ask for its activation; and ask for a warm draft where that is better.

It never raises for a full disk, an absent gateway or a refusal: it says what happened and learning goes on.
"""

from __future__ import annotations

import logging
import uuid
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from drafter.artifact import publish_draft
from drafter.draft import Draft
from drafter.target import TargetParts
from learner.admin import AdminClient
from learner.config import GateSettings
from learner.evaluate import Evaluator, simulated_al
from learner.judge import Judge
from learner.published import PublishedDrafts
from learner.replay import Replay
from learner.request import CapturedRequest
from learner.warm import Return, WarmDrafts, newest_unseen
from wire.artifact import GateReport, TrainingReport
from wire.control import ActivateRequest
from wire.errors import ArtifactError, StaleExpectation
from wire.spec import CaptureSpec
from wire.store import DraftStore

log = logging.getLogger(__name__)

_NOT_ACCEPTED = "draft_not_accepted"
"""The gateway's code for a draft that a canary rolled back, or that never passed a gate."""


class Publisher:
    """Owns the judge, the warm drafts and the way to the gateway; learning owns the candidate."""

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
        self._store, self._client, self._evaluator, self._spec = store, client, evaluator, spec
        self._settings, self._keep_versions = settings, keep_versions
        self._published = PublishedDrafts(store, evaluator, spec, target)
        self.warm = WarmDrafts(store, self._published, settings)
        self.judge = Judge(evaluator, self._published, settings)
        self.num_published = 0
        self.last_gate: GateReport | None = None
        self.decisions: Counter[str] = Counter()
        self.simulated_al: float | None = None
        """Of the draft that serves, on the requests of the last evaluation."""
        self.last_activated: int | None = None
        self.last_outcome = ""
        """In words: what became of the last evaluation."""

    def consider(self, candidate: Draft, training: TrainingReport, replay: Replay, active_version: int) -> str:
        """Evaluate: a warm draft is activated where it beats the active one, else the candidate where the gate says so.

        Without a gate (`unjudged_every_steps`) the candidate is activated.

        Returns `waiting`, `accepted`, `rejected`, `floor`, `returned`, `unusable`, `disk_error` or the gateway's refusal code.
        """
        if self._settings.unjudged_every_steps:
            _, outcome = self._publish(candidate, training, None, active_version)
            self._prune(active_version)
            return outcome
        fewest = self._settings.min_holdout_requests
        window = newest_unseen(replay, self._settings.shift_tokens, at_least=fewest)[: self._settings.max_requests]
        if len(window) < fewest:
            return self._conclude("waiting", f"{len(window)} of {fewest} unseen requests needed for a judgement")
        incumbent = self._published.scores(active_version, window)
        if incumbent is None:
            return self._conclude("unusable", f"the active draft {active_version} cannot be read, nothing to compare with")
        self._begin_round(active_version, replay)
        found = self.warm.find_return(active_version, replay)
        if found is not None:
            return self._return_to(found, active_version)
        groups = self._anchors(replay)
        report, scores = self.judge.judge(
            candidate, window, incumbent, self._guarded(groups, window), num_tokens=training.num_tokens_seen
        )
        self._note(report)
        self.simulated_al = simulated_al(incumbent.values())
        if not report.accepted:
            return self._conclude("rejected", report.reason)
        version, outcome = self._publish(candidate, training, report, active_version)
        if version is not None and outcome == "accepted":
            self._evaluator.remember(version, scores)
            self._published.hold(version, candidate)
            self.warm.crown(version, active_version, _by_domain(groups, window))
        self._prune(active_version)
        return outcome

    def take_unscorable(self) -> list[CapturedRequest]:
        """Requests the last evaluations failed with."""
        return self._evaluator.take_unscorable()

    def _begin_round(self, active_version: int, replay: Replay) -> None:
        self.warm.note_served(active_version)
        self.judge.begin(active_version, replay)
        known = [active_version, *self.warm.versions(active_version)]
        self._evaluator.keep_only(known, [request.key for request in replay.everything()])

    def _guarded(
        self, groups: Mapping[str, list[CapturedRequest]], recent: Sequence[CapturedRequest]
    ) -> dict[str, list[CapturedRequest]]:
        """Anchors of the domains that could lose: a domain nobody asks of now has its best draft warm, which returns with it."""
        present = {request.group for request in recent}
        return {name: group for name, group in groups.items() if name in present or name not in self.warm.champions}

    def _note(self, report: GateReport) -> None:
        self.last_gate = report
        self.decisions["accepted" if report.accepted else "rejected"] += 1

    def _publish(
        self, candidate: Draft, training: TrainingReport, report: GateReport | None, active_version: int
    ) -> tuple[int | None, str]:
        """The version it was given, None on a disk error, and the outcome. Without a report no gate has judged it."""
        try:
            version = publish_draft(
                self._store, candidate, self._spec, origin="learned", parent=active_version, training=training, gate=report
            )
        except OSError as error:
            return None, self._conclude("disk_error", f"cannot write a draft, training goes on: {error}")
        self.num_published += 1
        why = "unjudged" if report is None else report.reason
        outcome = self._activate(version, active_version, force=report is None, outcome="accepted", why=why)
        if outcome == "accepted" and report is not None:
            self.simulated_al = report.candidate_al
        return version, outcome

    def _return_to(self, found: Return, active_version: int) -> str:
        is_floor = found.version == self._store.floor()
        why = (
            f"{'floor' if is_floor else 'returning domain'}: gain of {found.gain.mean:+.3f} AL on the "
            f"{found.gain.num_requests} newest requests"
        )
        outcome = "floor" if is_floor else "returned"
        answer = self._activate(found.version, active_version, force=is_floor, outcome=outcome, why=why)
        if answer == outcome:
            self.simulated_al = found.simulated_al
        elif answer == _NOT_ACCEPTED:
            self.warm.refuse(found.version)
        return answer

    def _activate(self, version: int, expected_active: int, *, force: bool, outcome: str, why: str) -> str:
        request = ActivateRequest(expected_active=expected_active, force=force, reason=why)
        answer = self._client.activate(version, request, idempotency_key=f"learner-{version}-{uuid.uuid4().hex}")
        if answer.is_ok:
            self.last_activated = version
            return self._conclude(outcome, f"draft {version} serves instead of {expected_active}: {why}")
        if answer.code == StaleExpectation.code:
            return self._conclude(answer.code, f"draft {version} is forgotten: another draft became active meanwhile")
        return self._conclude(answer.code, f"draft {version} was not activated ({answer.code}): {answer.reason}")

    def _anchors(self, replay: Replay) -> dict[str, list[CapturedRequest]]:
        limit = self._settings.max_anchors_per_domain
        return {name: requests[:limit] for name, requests in replay.anchors.groups().items()}

    def _prune(self, active_version: int) -> None:
        try:
            self._store.prune(self._keep_versions, self.warm.versions(active_version))
        except (OSError, ArtifactError) as error:
            log.warning("cannot remove old drafts: %s", error)

    def _conclude(self, outcome: str, reason: str) -> str:
        self.last_outcome = reason
        log.info("gate: %s: %s", outcome, reason)
        return outcome


def _by_domain(
    groups: Mapping[str, Sequence[CapturedRequest]], recent: Sequence[CapturedRequest]
) -> dict[str, list[CapturedRequest]]:
    """Anchors and recent requests together, by domain."""
    domains = defaultdict(list, {name: list(requests) for name, requests in groups.items()})
    for request in recent:
        domains[request.group].append(request)
    return dict(domains)
