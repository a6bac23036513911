"""Readings: what an engine's cumulative counters grew by since its last message."""

from __future__ import annotations

from dataclasses import dataclass

from server.tally import Tally, total
from wire.messages import EngineStats


@dataclass(frozen=True, slots=True)
class Steps:
    """Decode steps of one kind."""

    num_steps: int
    total_s: float


@dataclass(frozen=True, slots=True)
class Reading:
    """What happened between two messages of one engine."""

    draft_version: int
    steps: dict[tuple[int, int], Steps]
    """By (bucket, K)."""
    tally: Tally
    """Verification of that draft's proposals."""


class Readings:
    """One per engine. What its counters held before its first message is not news; after its restart they count from zero."""

    def __init__(self) -> None:
        self._epoch = ""
        self._steps: dict[tuple[int, int], Steps] = {}
        self._tallies: dict[int, Tally] = {}

    def take(self, stats: EngineStats) -> Reading:
        is_first = not self._epoch
        if stats.engine_epoch != self._epoch:
            self._epoch, self._steps, self._tallies = stats.engine_epoch, {}, {}
        steps = {(each.bucket, each.depth): Steps(each.num_steps, each.total_s) for each in stats.step_times}
        versions = {count.draft_version for count in stats.acceptance}
        tallies = {version: _tally(stats, version) for version in versions}
        version = stats.draft_version
        grown = tallies.get(version, Tally()) - self._tallies.get(version, Tally())
        reading = Reading(
            version,
            {} if is_first else _grown(steps, self._steps),
            Tally() if is_first or not grown.is_possible else grown,
        )
        self._steps, self._tallies = steps, tallies
        return reading


def _tally(stats: EngineStats, version: int) -> Tally:
    return total(
        Tally(count.num_verify_steps, tuple(count.proposed_per_position), tuple(count.accepted_per_position))
        for count in stats.acceptance
        if count.draft_version == version
    )


def _grown(now: dict[tuple[int, int], Steps], before: dict[tuple[int, int], Steps]) -> dict[tuple[int, int], Steps]:
    none = Steps(0, 0.0)
    grown = {
        kind: Steps(steps.num_steps - before.get(kind, none).num_steps, steps.total_s - before.get(kind, none).total_s)
        for kind, steps in now.items()
    }
    return {kind: steps for kind, steps in grown.items() if steps.num_steps > 0 and steps.total_s > 0.0}
