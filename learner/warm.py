"""Warm drafts: versions that served before and may serve again without training, when the traffic they are good at returns.

They are the floor, the drafts that served last, and the best one of each domain. Each round of the gate compares them with
the active draft on the newest requests, a few of them where that says nothing for a return. Training goes on from the learner's own core whichever draft serves: its replay holds
every domain, a restart from older weights would throw away what it learned since, and as soon as it is better than the draft
that came back, the gate says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from learner.config import GateSettings
from learner.evaluate import simulated_al
from learner.gain import Gain, paired_gain
from learner.ledger import Ledger
from learner.published import PublishedDrafts
from learner.replay import Replay
from learner.request import CapturedRequest
from wire.errors import ArtifactError
from wire.store import DraftStore

_NUM_LAST_SERVED = 2
"""Beside the active one."""
_MAX_CHAMPIONS = 8


@dataclass(frozen=True)
class Return:
    """A warm draft that beats the active one on the newest requests, and its simulated AL there."""

    version: int
    gain: Gain
    simulated_al: float


class WarmDrafts:
    """Which versions are warm, and which of them should serve."""

    def __init__(self, store: DraftStore, published: PublishedDrafts, settings: GateSettings) -> None:
        self._store, self._published, self._settings = store, published, settings
        self._level = 1.0 - settings.confidence
        self._refused = {version for version in store.versions() if not published.fits(version)}
        self._created_at_s: dict[int, float] = {}
        self._against: int | None = None
        self._ledgers: dict[tuple[int, int], Ledger] = {}
        """Of each warm draft against an active one, by their versions: a draft that is active again has counted what it has."""
        self._served = [version for version in store.versions() if self._was_accepted(version)]
        """The one that served last at the end."""
        self.champions: dict[str, int] = {}
        """The best version by domain, the domain that was judged last at the end."""

    def versions(self, active: int) -> list[int]:
        """All that are warm beside the active one."""
        served = [version for version in self._served if version != active][-_NUM_LAST_SERVED:]
        wanted = dict.fromkeys([self._store.floor(), *self.champions.values(), *reversed(served)])
        there = set(self._store.versions()) - self._refused - {active}
        return [version for version in wanted if version in there]

    def note_served(self, version: int) -> None:
        """This version is the active one."""
        self._served = [other for other in self._served if other != version] + [version]

    def refuse(self, version: int) -> None:
        """The gateway will not have this version back."""
        self._refused.add(version)

    def crown(self, version: int, incumbent: int, evidence: Mapping[str, Sequence[CapturedRequest]]) -> None:
        """A draft that has just replaced the incumbent is the best of each domain where it beats the best so far.

        `evidence` are unseen requests by domain.
        """
        for domain, requests in evidence.items():
            if len(requests) < self._settings.min_holdout_requests:
                continue
            best = self.champions.pop(domain, incumbent)
            self.champions[domain] = max(version, best, key=lambda one: self._al(one, requests))
            self._ledgers.setdefault((best, version), Ledger(self._level)).pass_over(requests)
        for domain in list(self.champions)[:-_MAX_CHAMPIONS]:
            del self.champions[domain]

    def find_return(self, active: int, replay: Replay) -> Return | None:
        """The warm draft that gains most over the active one, None where no gain is sure. They share the chance of an error."""
        warm = self.versions(active)
        self._begin(active, warm, replay)
        found = [self._judge(version, active, replay) for version in warm]
        return max((one for one in found if one is not None), key=lambda one: one.gain.mean, default=None)

    def _begin(self, active: int, warm: Sequence[int], replay: Replay) -> None:
        level = self._level / max(len(warm), 1)
        known = {active, *warm}
        self._ledgers = {pair: ledger for pair, ledger in self._ledgers.items() if known.issuperset(pair)}
        for version in warm:
            ledger = self._ledgers.setdefault((version, active), Ledger(level))
            if active != self._against:
                ledger.restart(level)
        prompt_keys = {request.prompt_key for request in replay.everything()}
        for ledger in self._ledgers.values():
            ledger.keep_only(prompt_keys)
        self._against = active

    def _judge(self, version: int, active: int, replay: Replay) -> Return | None:
        since_s = max(self._created_s(version), self._created_s(active))
        fewest = self._settings.min_holdout_requests
        window = newest_unseen(replay, self._settings.shift_tokens, at_least=fewest, since_s=since_s)
        self._count(version, active, window)
        if not self._ledgers[version, active].wager.is_won:
            return None
        after, before = self._published.scores(version, window), self._published.scores(active, window)
        if after is None or before is None:
            return None
        gain = paired_gain(after, before, num_resamples=self._settings.num_resamples)
        is_gain = gain.num_requests >= fewest and gain.mean >= self._settings.min_gain
        return Return(version, gain, simulated_al(after.values())) if is_gain else None

    def _count(self, version: int, active: int, window: Sequence[CapturedRequest]) -> None:
        """Count the requests that are new, the newest first and on for as long as they speak for a return: mostly none does."""
        ledger, fewest = self._ledgers[version, active], self._settings.min_holdout_requests
        new = ledger.uncounted(window)
        for start in range(0, len(new), fewest):
            few = new[start : start + fewest]
            after, before = self._published.scores(version, few), self._published.scores(active, few)
            if after is None or before is None:
                return
            ledger.count(few, after, before)
            if not simulated_al(after.values()) > simulated_al(before.values()):
                return

    def _al(self, version: int, requests: Sequence[CapturedRequest]) -> float:
        """Simulated AL; 0, which none has, for a draft that cannot be used."""
        scores = self._published.scores(version, requests)
        return 0.0 if scores is None else simulated_al(scores.values())

    def _created_s(self, version: int) -> float:
        """Unix time at which a version was written: it was trained on nothing that was captured later. Endless where unknown."""
        if version not in self._created_at_s:
            try:
                self._created_at_s[version] = self._store.manifest(version).created_at_s
            except ArtifactError:
                return float("inf")
        return self._created_at_s[version]

    def _was_accepted(self, version: int) -> bool:
        try:
            gate = self._store.manifest(version).gate
        except ArtifactError:
            return False
        return gate is not None and gate.accepted


def newest_unseen(replay: Replay, num_tokens: int, *, at_least: int, since_s: float = float("inf")) -> list[CapturedRequest]:
    """The newest requests, newest first, that no draft made before `since_s` was trained on.

    These are what no draft was trained on, and of the others those captured since; up to so many completion tokens, but at
    least that many requests.
    """
    unseen: Iterable[CapturedRequest] = chain(
        replay.evidence(), (request for request in replay.recent if request.captured_at_s > since_s)
    )
    found: list[CapturedRequest] = []
    total = 0
    for request in sorted(unseen, key=lambda one: one.captured_at_s, reverse=True):
        if len(found) >= at_least and total + request.num_tokens > num_tokens:
            break
        found.append(request)
        total += request.num_tokens
    return found
