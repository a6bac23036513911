"""The ledger of a run, which tells each group's stations to its history."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from rl.run.history import GroupEvent, Station
from rl.run.lines import Lines
from rl.staleness.ledger import Entry, Eviction, Ledger, LedgerState, Reason
from rl.trajectory import Group


class ToldLedger(Ledger):
    """Tells nothing before `tell_to` was called: what a resumption evicts is told by whoever resumes."""

    def __init__(self, state: LedgerState, *, eta: int, groups_per_version: int) -> None:
        super().__init__(state, eta=eta, groups_per_version=groups_per_version)
        self._history: Lines[GroupEvent] | None = None
        self._clock: Callable[[], float] = time.time
        self._num_evicted: Counter[str] = Counter()

    def tell_to(self, history: Lines[GroupEvent], clock: Callable[[], float] = time.time) -> None:
        """clock: Unix time."""
        self._history, self._clock = history, clock

    def submit(self, environment: str, environment_seed: int, *, refill_of: int | None = None) -> Entry:
        entry = super().submit(environment, environment_seed, refill_of=refill_of)
        self._tell(entry, "submitted", refill_of=refill_of)
        return entry

    def finish(self, group: Group) -> bool:
        is_awaited = super().finish(group)
        if is_awaited:
            self._tell(next(entry for entry in self.state.open if entry.group_id == group.group_id), "finished")
        return is_awaited

    def take(self, count: int) -> tuple[Entry, ...]:
        taken = super().take(count)
        for entry in taken:
            self._tell(entry, "taken")
        return taken

    def advance(self, version: int) -> tuple[Eviction, ...]:
        trained = self.state.training
        evictions = super().advance(version)
        for entry in trained:
            self._tell(entry, "trained")
        return evictions

    def evict(self, group_ids: Sequence[int], reason: Reason) -> tuple[Eviction, ...]:
        evictions = super().evict(group_ids, reason)
        self.tell_evicted(evictions)
        return evictions

    def tell_evicted(self, evictions: Sequence[Eviction]) -> None:
        for eviction in evictions:
            self._tell(eviction.entry, "evicted", reason=eviction.reason)

    def take_evicted(self) -> dict[str, int]:
        """Groups evicted since this was asked last, by reason."""
        found, self._num_evicted = dict(self._num_evicted), Counter()
        return found

    def _tell(self, entry: Entry, station: Station, *, reason: str = "", refill_of: int | None = None) -> None:
        if self._history is None:
            return
        if station == "evicted":
            self._num_evicted[reason] += 1
        self._history.append(
            GroupEvent(
                at_s=self._clock(),
                group_id=entry.group_id,
                station=station,
                version=self.state.version,
                environment=entry.environment,
                environment_seed=entry.environment_seed,
                attempt=entry.attempt,
                oldest_version=entry.oldest_version,
                reason=reason,
                refill_of=refill_of,
            )
        )
