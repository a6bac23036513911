"""FloorWatch: the active draft against the floor on live traffic, for as long as it serves, and without the learner.

The canary asks once, after a swap, whether the new draft is worse than the one before it. Traffic changes later, and then a draft
that was better may be worse than the floor. This is noticed here, by served AL alone.

What can be known: only the active draft serves, so nothing tells what the floor would do *now*. Known is what it did itself when it
last served on a domain (the engines' counters, so a gateway that restarts knows it as far back as engines live and while the floor
is among the drafts they still count). Simulated AL is not used: its error as a measure of served AL is known for a draft's whole mix
of domains only. What a domain's name means may have changed meanwhile, and then its traffic is taken for a loss. So the floor's
return is itself a measurement: back in service, the floor is compared with what the draft it replaced did a moment ago, and where
it lacks more than `canary.max_relative_drop` that draft serves again. From then on the floor is known by these newest numbers, and
the next return takes more evidence.

Of a domain on which the floor never served nothing is known. It counts neither way, and where most of the traffic is such, nothing is done.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from server.acceptance import BATCHES_PER_WINDOW, AcceptanceLedger
from server.canary import RETRY_S
from server.config import CanarySettings
from server.drafts import Drafts
from server.tally import Tally, total
from server.verdict import MIN_BASELINE_STEPS, judge, measure_design_effect
from wire.control import FloorDomain, FloorView

MAX_LOSS = 0.03
"""Of the floor's AL that the active draft may lack. Small losses are found too, in the long window."""
CANARY_WINDOWS = 10
"""The sliding window holds that many times the verify steps of a canary's verdict."""
MIN_KNOWN_SHARE = 0.5
"""Of the window's verify steps, in domains on which the floor is known: a roll back changes the draft of all."""
SIGMAS_LOST = 4.0
"""More than the canary's: this watch never ends, so chance gets thousands of tries."""
SIGMAS_BACK = 1.0
"""Back in service both drafts are measured on the traffic of now, and one of them has to serve: the likelier one does, beyond the canary's tolerance."""


@dataclass(frozen=True, slots=True)
class FloorChange:
    """`version` is to serve instead of `leaves`, whose newest verify steps by domain are `evidence`."""

    version: int
    leaves: int
    reason: str
    evidence: Mapping[str, Tally]


class DomainWindow:
    """The newest verify steps of one draft by domain, in order of time, at least `min_steps` where there were so many."""

    def __init__(self, min_steps: int) -> None:
        self._min_steps = min_steps
        self._min_batch = min_steps / (CANARY_WINDOWS * BATCHES_PER_WINDOW)
        self._batches: deque[dict[str, Tally]] = deque()
        self.whole: dict[str, Tally] = {}

    def add(self, part: Mapping[str, Tally]) -> None:
        part = {domain: tally for domain, tally in part.items() if tally.num_verify_steps}
        if not part:
            return
        self.whole = _sum(self.whole, part)
        is_small = bool(self._batches) and _num_steps(self._batches[-1]) < self._min_batch
        self._batches.append(_sum(self._batches.pop(), part) if is_small else part)
        num_steps = _num_steps(self.whole)
        while num_steps - _num_steps(self._batches[0]) >= self._min_steps:
            oldest = self._batches.popleft()
            num_steps -= _num_steps(oldest)
            left = {domain: tally - oldest.get(domain, Tally()) for domain, tally in self.whole.items()}
            self.whole = {domain: tally for domain, tally in left.items() if tally.num_verify_steps}

    def newest(self, num_steps: int) -> dict[str, Tally]:
        """The shortest end of the window that has so many verify steps, else all of it."""
        found: dict[str, Tally] = {}
        num_found = 0
        for batch in reversed(self._batches):
            if num_found >= num_steps:
                break
            for domain, tally in batch.items():
                found[domain] = found[domain] + tally if domain in found else tally
                num_found += tally.num_verify_steps
        return found


class FloorWatch:
    """`evaluate` is called about once a second and says what should serve; `swap` does it and calls `note`."""

    def __init__(self, ledger: AcceptanceLedger, drafts: Drafts, settings: CanarySettings) -> None:
        self.view = FloorView(state="idle")
        self._ledger, self._drafts, self._settings = ledger, drafts, settings
        self._active: int | None = None
        self._floor: int | None = None
        self._min_steps = settings.min_verify_steps
        self._window = DomainWindow(0)
        self._design_effect = 1.0
        """Of the floor's verify steps, when it last served."""
        self._seen: dict[str, Tally] = {}
        """All the active draft did, when it was last looked at."""
        self._stint_from: dict[str, Tally] = {}
        """All the floor had done when it last became active."""
        self._known_from: dict[str, Tally] = {}
        """The same of the stint before it, for domains that the last one did not meet."""
        self._under_another_target: dict[int, dict[str, Tally]] = {}
        """All that each draft had done when the target changed, by version and domain."""
        self._left: FloorChange | None = None
        """The return of the floor that is not confirmed yet."""
        self._deadline_s = 0.0
        self._not_before_s = 0.0
        self._problem = ""
        """Why a change that is due could not be made."""

    def evaluate(self) -> FloorChange | None:
        """What should be done as of now."""
        if not self._settings.watch_floor:
            self.view = FloorView(state="idle", reason="switched off")
            return None
        self._follow_versions()
        active, floor = self._active, self._floor
        if active is None or floor is None:
            self.view = FloorView(state="idle", version=active, reason="there is no floor")
            return None
        if active == floor:
            return self._judge_return(floor)
        now = self._ledger.totals_by_domain(active)
        self._window.add({domain: tally - self._seen.get(domain, Tally()) for domain, tally in now.items()})
        self._seen = now
        return self._judge_active(active, floor)

    def note(self, change: FloorChange) -> None:
        """It was done."""
        self._not_before_s = 0.0
        if change.version == self._floor:
            self._measure_floor()
            self._left, self._deadline_s = change, time.monotonic() + self._settings.deadline_s
        else:
            self._left = None
            self._min_steps = min(2 * self._min_steps, CANARY_WINDOWS * self._settings.min_verify_steps)

    def postpone(self, reason: str) -> None:
        """It could not be done."""
        self._not_before_s, self._problem = time.monotonic() + RETRY_S, reason

    def forget(self) -> None:
        """Begin anew under another target: what drafts did under the one before tells nothing of what they do now."""
        self._active, self._left = None, None
        self._not_before_s, self._min_steps = 0.0, self._settings.min_verify_steps
        versions = self._ledger.totals_by_version()
        self._under_another_target = {version: self._ledger.totals_by_domain(version) for version in versions}
        self._begin_with_floor(self._floor)

    def _begin_with_floor(self, floor: int | None) -> None:
        self._floor = floor
        self._stint_from = self._known_from = {} if floor is None else self._under_another_target.get(floor, {})

    def _follow_versions(self) -> None:
        """Begin anew where another draft serves, or another one is the floor."""
        active, floor = self._drafts.active, self._drafts.floor
        if floor != self._floor:
            self._active, self._left = None, None
            self._begin_with_floor(floor)
            self._min_steps = self._settings.min_verify_steps
        if active == self._active or active is None:
            return
        self._active = active
        self._not_before_s = 0.0
        now = self._ledger.totals_by_domain(active)
        if active == floor:
            known_from = {domain: self._mark(domain, tally) for domain, tally in now.items()}
            self._known_from, self._stint_from = known_from, now
        else:
            self._left = None
            self._seen = now
            self._measure_floor()
            self._window = DomainWindow(CANARY_WINDOWS * self._settings.min_verify_steps)

    def _measure_floor(self) -> None:
        batches = [] if self._floor is None else self._ledger.batches_of(self._floor)
        self._design_effect = measure_design_effect(batches)

    def _judge_active(self, active: int, floor: int) -> FloorChange | None:
        known, whole = self._known(floor), self._window.whole
        self._show(active, floor, whole, known)
        if time.monotonic() < self._not_before_s:
            self.view = msgspec.structs.replace(self.view, reason=self._problem)
            return None
        for window in (self._window.newest(self._min_steps), whole):
            verdict = judge(
                window,
                known,
                min_verify_steps=self._min_steps,
                max_relative_drop=MAX_LOSS,
                design_effect=self._design_effect,
                num_sigmas=SIGMAS_LOST,
            )
            self.view = msgspec.structs.replace(self.view, reason=self.view.reason or verdict.reason)
            if verdict.num_verify_steps < MIN_KNOWN_SHARE * _num_steps(window):
                continue
            if verdict.outcome == "roll_back":
                return FloorChange(floor, active, f"worse than the floor when it last served here: {verdict.reason}", window)
        return None

    def _judge_return(self, floor: int) -> FloorChange | None:
        left = self._left
        if left is None:
            self.view = FloorView(state="idle", version=floor, floor_version=floor, reason="the floor itself serves")
            return None
        if time.monotonic() < self._not_before_s:
            self.view = FloorView(state="back", version=floor, floor_version=floor, reason=self._problem)
            return None
        now = self._ledger.totals_by_domain(floor)
        stint = {domain: tally - self._stint_from.get(domain, Tally()) for domain, tally in now.items()}
        verdict = judge(
            stint,
            left.evidence,
            min_verify_steps=self._settings.min_verify_steps,
            max_relative_drop=self._settings.max_relative_drop,
            design_effect=self._design_effect,
            num_sigmas=SIGMAS_BACK,
        )
        self.view = FloorView(state="back", version=floor, floor_version=floor, reason=f"draft {left.leaves}: {verdict.reason}")
        if verdict.outcome == "pass":
            self._left, self._min_steps = None, self._settings.min_verify_steps
        elif time.monotonic() > self._deadline_s:  # also where the draft cannot be had back: it may be gone from disk
            self._left = None
        elif verdict.outcome == "roll_back":
            return FloorChange(left.leaves, floor, f"the floor is worse on the traffic of now: {verdict.reason}", stint)
        return None

    def _known(self, floor: int) -> dict[str, Tally]:
        """What the floor did on each domain when it last met it, the recent window of that."""
        recent = self._ledger.recent_by_domain(floor)
        found = {}
        for domain, tally in self._ledger.totals_by_domain(floor).items():
            since = tally - self._mark(domain, tally)
            found[domain] = min(since, recent.get(domain, since), key=lambda one: one.num_verify_steps)
        return found

    def _mark(self, domain: str, tally: Tally) -> Tally:
        """Where that begins which is known of the floor, of which `tally` is all it ever did there."""
        last = self._stint_from.get(domain, Tally())
        met = (tally - last).num_verify_steps >= MIN_BASELINE_STEPS
        return last if met else self._known_from.get(domain, Tally())

    def _show(self, active: int, floor: int, window: Mapping[str, Tally], known: Mapping[str, Tally]) -> None:
        domains = tuple(_domain_view(domain, tally, known.get(domain, Tally())) for domain, tally in sorted(window.items()))
        unknown = [one.domain for one in domains if one.floor_acceptance_length is None]
        is_known = len(unknown) < len(domains)
        reason = ""
        if not domains:
            reason = "no verify steps yet"
        elif not is_known:
            reason = f"the floor has not served on {', '.join(unknown)} since the engines started: nothing to compare with"
        state = "watching" if is_known or not domains else "unknown"
        self.view = FloorView(state=state, version=active, floor_version=floor, domains=domains, reason=reason)


def _domain_view(domain: str, tally: Tally, floor: Tally) -> FloorDomain:
    is_known = floor.num_verify_steps >= MIN_BASELINE_STEPS
    return FloorDomain(
        domain=domain,
        num_verify_steps=tally.num_verify_steps,
        acceptance_length=tally.acceptance_length,
        floor_num_verify_steps=floor.num_verify_steps,
        floor_acceptance_length=floor.acceptance_length if is_known else None,
    )


def _num_steps(by_domain: Mapping[str, Tally]) -> int:
    return sum(tally.num_verify_steps for tally in by_domain.values())


def _sum(left: Mapping[str, Tally], right: Mapping[str, Tally]) -> dict[str, Tally]:
    return {name: total(part.get(name, Tally()) for part in (left, right)) for name in dict.fromkeys((*left, *right))}
