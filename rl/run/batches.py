"""Batches: finished groups wait here until the ledger lets enough of them be trained on.

Dynamic sampling (DAPO, arXiv 2503.14476): a group whose rewards are all equal teaches nothing; it is evicted as soon as it is taken, and
another one fills its place in the batch. It stays in what the trainer is given, which leaves it out and counts its rewards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from rl.algorithms.sampling import has_signal
from rl.staleness.ledger import Ledger
from rl.trajectory import Group

MAX_SILENT = 3
"""Groups without signal that a batch takes at most, as a multiple of those it wants: where nothing is learned any more, steps go on
and say so."""


class Batches:
    """waiting: what finished before this process began. on_evict: told after an eviction, so that refills begin."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        groups_per_step: int,
        drop_equal_rewards: bool,
        waiting: Sequence[Group],
        on_evict: Callable[[], None],
    ) -> None:
        self._ledger = ledger
        self._groups_per_step = groups_per_step
        self._drop_equal_rewards = drop_equal_rewards
        self._on_evict = on_evict
        self._waiting = {group.group_id: group for group in waiting}
        self._changed = asyncio.Event()

    def add(self, group: Group) -> None:
        """A group that the ledger counts as waiting."""
        self._waiting[group.group_id] = group
        self._changed.set()

    @property
    def waiting(self) -> tuple[Group, ...]:
        """Those the ledger counts as waiting, by id."""
        known = {entry.group_id for entry in self._ledger.state.open}
        return tuple(group for group_id, group in sorted(self._waiting.items()) if group_id in known)

    async def next(self) -> tuple[list[Group], int]:
        """(The groups of the next batch, how many of them have signal). Those with signal are in training now, the others evicted."""
        kept: list[Group] = []
        silent: list[Group] = []
        while len(kept) < self._groups_per_step and len(silent) < MAX_SILENT * self._groups_per_step:
            self._changed.clear()
            taken = self._take(self._groups_per_step - len(kept))
            without = [group for group in taken if self._drop_equal_rewards and not has_signal(group)]
            if without:
                self._ledger.evict([group.group_id for group in without], "no signal")
                self._on_evict()
            kept += [group for group in taken if group not in without]
            silent += without
            if not taken:
                await self._changed.wait()
        return [*kept, *silent], len(kept)

    def _take(self, count: int) -> list[Group]:
        before = len(self._ledger.state.owed)
        entries = self._ledger.take(count)
        if len(self._ledger.state.owed) > before:
            self._on_evict()
        known = {entry.group_id for entry in self._ledger.state.open}
        taken = [self._waiting.pop(entry.group_id) for entry in entries]
        self._waiting = {group_id: group for group_id, group in self._waiting.items() if group_id in known}
        return taken
