"""Canary: the watch over the live AL of a draft that has just been committed.

It gathers the numbers and remembers the state; `verdict.judge` decides and `swap` acts.
"""

from __future__ import annotations

import time

import msgspec

from server.acceptance import AcceptanceLedger
from server.config import CanarySettings
from server.tally import Tally, total
from server.verdict import Verdict, judge, measure_design_effect
from wire.control import CanaryView

RETRY_S = 10.0
"""Before a roll back that no engine would take is tried again."""


class Canary:
    """At most one draft is watched at a time."""

    def __init__(self, ledger: AcceptanceLedger, settings: CanarySettings) -> None:
        self.view = CanaryView(state="idle")
        self._ledger = ledger
        self._settings = settings
        self._baseline: dict[str, Tally] = {}
        self._before: dict[str, Tally] = {}
        self._design_effect = 1.0
        self._deadline_s = 0.0
        self._not_before_s = 0.0

    @property
    def is_watching(self) -> bool:
        return self.view.state == "watching"

    @property
    def trusted_version(self) -> int | None:
        """The version an undecided canary would go back to."""
        return self.view.baseline_version if self.is_watching else None

    def begin(self, version: int, baseline_version: int | None) -> None:
        """Watch `version` from now on, against the recent AL of the baseline."""
        self.supersede(f"draft {version} was activated before a verdict")
        if baseline_version is None or baseline_version == version:
            self.view = CanaryView(state="idle", version=version, reason="nothing to compare with")
            return
        self._baseline = self._ledger.recent_by_domain(baseline_version)
        self._design_effect = measure_design_effect(self._ledger.batches_of(baseline_version))
        self._before = self._ledger.totals_by_domain(version)
        self._deadline_s = time.monotonic() + self._settings.deadline_s
        self._not_before_s = 0.0
        baseline = total(self._baseline.values())
        self.view = CanaryView(
            state="watching",
            version=version,
            baseline_version=baseline_version,
            baseline_acceptance_length=baseline.acceptance_length if baseline.num_verify_steps else None,
            reason="waiting for verify steps",
        )

    def supersede(self, reason: str) -> None:
        if self.is_watching:
            self.finish("superseded", reason)

    def finish(self, state: str, reason: str) -> None:
        self.view = msgspec.structs.replace(self.view, state=state, reason=reason)

    def postpone(self, reason: str) -> None:
        """A roll back is due but could not be done."""
        self._not_before_s = time.monotonic() + RETRY_S
        self.view = msgspec.structs.replace(self.view, reason=reason)

    def evaluate(self) -> Verdict | None:
        """The verdict as of now; None when nothing is watched or the watch has just run out of time."""
        if not self.is_watching or time.monotonic() < self._not_before_s:
            return None
        assert self.view.version is not None
        now = self._ledger.totals_by_domain(self.view.version)
        candidate = {domain: tally - self._before.get(domain, Tally()) for domain, tally in now.items()}
        verdict = judge(
            candidate,
            self._baseline,
            min_verify_steps=self._settings.min_verify_steps,
            max_relative_drop=self._settings.max_relative_drop,
            design_effect=self._design_effect,
        )
        self.view = msgspec.structs.replace(
            self.view,
            num_verify_steps=verdict.num_verify_steps,
            acceptance_length=verdict.candidate_al,
            baseline_acceptance_length=verdict.baseline_al or self.view.baseline_acceptance_length,
            reason=verdict.reason,
        )
        if verdict.outcome == "wait" and time.monotonic() > self._deadline_s:
            self.finish("undecided", f"no verdict within {self._settings.deadline_s:g} s: {verdict.reason}")
            return None
        return verdict
