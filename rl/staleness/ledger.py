"""Every group from its submission to its end: trained on, or evicted and owed anew. Nothing is lost and nothing counted twice.

    submit -> running -> finish -> waiting -> take -> in training -> advance -> gone
                 |                    |                   |
                 +------ evict: its refill is owed until a submission pays for it

Groups are evicted whole: an advantage compares rollouts of one prompt, and half of them would be another comparison. A running group
is evicted as soon as it would be too old if it were taken now, so that its tokens need not be finished.

The ledger has no clock and knows no tokens. Its state is frozen and goes into the trainer's checkpoint, as one with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from rl.staleness.admission import capacity, limit
from rl.staleness.window import Rank, choose, window_size
from rl.trajectory import Group
from wire.errors import RolloutError
from wire.spec import SCHEMA_VERSION

Reason = Literal["too old", "no signal", "failed"]
"""`too old`: the same prompt may be asked again; `no signal`: all its rewards were equal, another one teaches more; `failed`: its
environment or its engine did."""


class Entry(Struct, frozen=True, kw_only=True):
    """One group that was submitted."""

    group_id: int
    environment: str
    environment_seed: int
    submitted_version: int
    """Of the newest target at submission."""
    attempt: int = 0
    """How many groups before it were evicted and led to this one. A prompt that is too old each time takes longer than eta updates."""
    finished_rank: int | None = None
    """Counts groups as they finish; None while it runs."""
    oldest_version: int | None = None
    """Of its oldest token, known when it has finished."""

    def staleness(self, version: int) -> int:
        """Versions from its oldest token (while it runs, from its submission) to `version`."""
        return version - (self.submitted_version if self.oldest_version is None else self.oldest_version)


class Eviction(Struct, frozen=True, kw_only=True):
    """A group that will not be trained on, and so a refill that is owed."""

    entry: Entry
    reason: Reason

    @property
    def is_running(self) -> bool:
        """Whether an engine may still work on it: abort that."""
        return self.entry.finished_rank is None


class LedgerState(Struct, frozen=True, kw_only=True, tag="rollout_ledger"):
    """All a ledger knows."""

    schema_version: int = SCHEMA_VERSION
    version: int
    """Of the newest target."""
    next_group_id: int = 0
    next_finished_rank: int = 0
    open: tuple[Entry, ...] = ()
    """Running and waiting groups, by id."""
    training: tuple[Entry, ...] = ()
    """Taken since the version last changed."""
    owed: tuple[Eviction, ...] = ()
    """Evicted groups no submission has replaced yet, in order."""


class Ledger:
    """eta: by how many versions the oldest token may trail the newest target when its group is taken.

    Raises ConfigError where eta or groups_per_version cannot be, RolloutError where the state is of another schema.
    """

    def __init__(self, state: LedgerState, *, eta: int, groups_per_version: int) -> None:
        if state.schema_version != SCHEMA_VERSION:
            raise RolloutError(
                f"a ledger of schema {state.schema_version}, this process reads {SCHEMA_VERSION}; resume with the release that wrote it"
            )
        self.state = state
        self.eta = eta
        self.groups_per_version = groups_per_version
        self.window_size = window_size(limit(eta, groups_per_version))

    @classmethod
    def resume(
        cls, state: LedgerState, version: int, *, eta: int, groups_per_version: int
    ) -> tuple[Ledger, tuple[Eviction, ...]]:
        """The ledger of a checkpoint where `version` serves now, and what is too old there.

        Groups that were in training are waiting again: the checkpoint's weights have not learned from them. Running ones are taken to
        run on; evict as `failed` those that no engine works on any more. Raises RolloutError where the version is an older one.
        """
        if version < state.version:
            raise RolloutError(
                f"resuming at version {version} with a ledger of version {state.version}; take both from one checkpoint"
            )
        reopened = tuple(sorted((*state.open, *state.training), key=lambda entry: entry.group_id))
        ledger = cls(
            replace(state, version=version, open=reopened, training=()), eta=eta, groups_per_version=groups_per_version
        )
        return ledger, ledger._evict_too_old()

    @property
    def capacity(self) -> int:
        """How many groups may be submitted now."""
        return capacity(self.eta, self.groups_per_version, len(self.state.open) + len(self.state.training))

    @property
    def num_waiting(self) -> int:
        return sum(entry.finished_rank is not None for entry in self.state.open)

    def submit(self, environment: str, environment_seed: int, *, refill_of: int | None = None) -> Entry:
        """A new group, now running. It pays for the refill of group `refill_of`, where one is named.

        Raises RolloutError where there is no capacity, or no such refill is owed.
        """
        state = self.state
        if self.capacity == 0:
            raise RolloutError(
                f"{len(state.open)} groups are under way and {len(state.training)} in training at version {state.version}, eta "
                f"{self.eta} allows no more; submit while `capacity` is above 0"
            )
        paid = [eviction for eviction in state.owed if eviction.entry.group_id == refill_of]
        if refill_of is not None and not paid:
            raise RolloutError(f"no refill is owed for group {refill_of}; each eviction is paid for once")
        entry = Entry(
            group_id=state.next_group_id,
            environment=environment,
            environment_seed=environment_seed,
            submitted_version=state.version,
            attempt=paid[0].entry.attempt + 1 if paid else 0,
        )
        self.state = replace(
            state,
            next_group_id=state.next_group_id + 1,
            open=(*state.open, entry),
            owed=tuple(eviction for eviction in state.owed if eviction not in paid),
        )
        return entry

    def finish(self, group: Group) -> bool:
        """Whether the finished group waits now to be taken. False: nobody waits for it.

        It was evicted meanwhile, or has finished before, or is of another prompt: a ledger that resumed gives ids anew which engines
        may still be working on.
        """
        entry = next((entry for entry in self.state.open if entry.group_id == group.group_id), None)
        if entry is None or entry.finished_rank is not None:
            return False
        if (entry.environment, entry.environment_seed) != (group.environment, group.environment_seed):
            return False
        finished = replace(entry, finished_rank=self.state.next_finished_rank, oldest_version=group.oldest_version)
        self.state = replace(
            self.state,
            open=tuple(finished if other is entry else other for other in self.state.open),
            next_finished_rank=self.state.next_finished_rank + 1,
        )
        return True

    def take(self, count: int) -> tuple[Entry, ...]:
        """`count` groups to train on at this version, all or none, each by its oldest token at most eta versions old.

        Older ones are evicted first. Few are: `advance` has been through, but engines take an update one after the other, so that a
        token may be older than the version its group was submitted at.
        """
        self._evict_too_old()
        open_ids = [entry.group_id for entry in self.state.open]
        ids = choose(open_ids, {entry.group_id: rank for entry, rank in self._ranks()}, count, self.window_size)
        if len(ids) < count:
            return ()
        by_id = {entry.group_id: entry for entry in self.state.open}
        taken = tuple(by_id[group_id] for group_id in ids)
        rest = tuple(entry for entry in self.state.open if entry not in taken)
        self.state = replace(self.state, open=rest, training=(*self.state.training, *taken))
        return taken

    def advance(self, version: int) -> tuple[Eviction, ...]:
        """A newer target serves on every engine: what was in training is done, what is too old now is evicted, running or not.

        Raises RolloutError where the version is not newer.
        """
        if version <= self.state.version:
            raise RolloutError(f"version {version} follows version {self.state.version}; versions count up")
        self.state = replace(self.state, version=version, training=())
        return self._evict_too_old()

    def evict(self, group_ids: Sequence[int], reason: Reason) -> tuple[Eviction, ...]:
        """Whole groups, open or in training (before their loss is made); each is owed anew. Raises RolloutError for any other."""
        state, doomed = self.state, set(group_ids)
        evictions = tuple(
            Eviction(entry=entry, reason=reason) for entry in (*state.open, *state.training) if entry.group_id in doomed
        )
        unknown = doomed - {eviction.entry.group_id for eviction in evictions}
        if unknown:
            raise RolloutError(f"groups {sorted(unknown)} are neither under way nor in training; each is evicted once")
        self.state = replace(
            state,
            open=tuple(entry for entry in state.open if entry.group_id not in doomed),
            training=tuple(entry for entry in state.training if entry.group_id not in doomed),
            owed=(*state.owed, *evictions),
        )
        return evictions

    def _ranks(self) -> Iterator[tuple[Entry, Rank]]:
        for entry in self.state.open:
            if entry.finished_rank is not None:
                yield entry, (entry.staleness(self.state.version) < self.eta, entry.finished_rank)

    def _evict_too_old(self) -> tuple[Eviction, ...]:
        state = self.state
        return self.evict([entry.group_id for entry in state.open if entry.staleness(state.version) > self.eta], "too old")
