"""Warm drafts: versions that served before and may serve again without training, when the traffic they are good at returns.

They are the floor, the drafts that served last, and the best one of each domain. Each round of the gate compares them with
the active draft on the newest requests. Training goes on from the learner's own core whichever draft serves: its replay holds
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
from learner.looks import level_of_look
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
        self._refused: set[int] = set()
        self._created_at_s: dict[int, float] = {}
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
        for domain in list(self.champions)[:-_MAX_CHAMPIONS]:
            del self.champions[domain]

    def find_return(self, active: int, replay: Replay, look: int) -> Return | None:
        """The warm draft that gains most over the active one, None where no gain is sure. They share the level of the look."""
        warm = self.versions(active)
        found = [self._judge(version, active, replay, level_of_look(look, self._settings) / len(warm)) for version in warm]
        return max((one for one in found if one is not None), key=lambda one: one.gain.mean, default=None)

    def _judge(self, version: int, active: int, replay: Replay, level: float) -> Return | None:
        fewest = self._settings.min_holdout_requests
        window = newest_unseen(
            replay, self._settings.shift_tokens, since_s=max(self._created_s(version), self._created_s(active))
        )
        # Most rounds there is no shift, and the very newest requests are enough to see that a draft would not help.
        if len(window) < fewest or not self._al(version, window[:fewest]) > self._al(active, window[:fewest]):
            return None
        after, before = self._published.scores(version, window), self._published.scores(active, window)
        if after is None or before is None:
            return None
        gain = paired_gain(after, before, num_resamples=self._settings.num_resamples)
        is_sure = gain.num_requests >= fewest and gain.low(level) > 0 and gain.mean >= self._settings.min_gain
        return Return(version, gain, simulated_al(after.values())) if is_sure else None

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


def newest_unseen(replay: Replay, num_tokens: int, *, since_s: float) -> list[CapturedRequest]:
    """The newest requests, newest first, that no draft made before `since_s` was trained on, up to so many completion tokens.

    These are the gate's evidence, and of the others those captured since.
    """
    unseen: Iterable[CapturedRequest] = chain(
        replay.evidence(), (request for request in replay.recent if request.captured_at_s > since_s)
    )
    found: list[CapturedRequest] = []
    total = 0
    for request in sorted(unseen, key=lambda one: one.captured_at_s, reverse=True):
        if found and total + request.num_tokens > num_tokens:
            break
        found.append(request)
        total += request.num_tokens
    return found
