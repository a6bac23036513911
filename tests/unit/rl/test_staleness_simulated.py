"""Whole runs against the ledger, with books of the test's own: random answer times, failures, equal rewards, engines that take an
update late, kills and resumes. Time is a count of ticks; every run follows from its seed."""

from __future__ import annotations

from random import Random

import msgspec
import pytest
from rl_samples import make_group

from rl.staleness.ledger import Entry, Ledger, LedgerState


class Run:
    """A generator with `num_seats` groups at a time and a trainer, driven tick by tick."""

    def __init__(self, seed: int, eta: int, groups_per_version: int, *, num_seats: int = 12, is_calm: bool = False) -> None:
        self.random = Random(seed)
        self.eta, self.groups_per_version, self.num_seats, self.is_calm = eta, groups_per_version, num_seats, is_calm
        self.ledger = Ledger(LedgerState(version=0), eta=eta, groups_per_version=groups_per_version)
        self.running: dict[int, tuple[int, int | None]] = {}
        """Ticks to go and version of the first token, by group."""
        self.training_ticks = 0
        self.submitted: set[int] = set()
        self.trained: list[int] = []
        self.evicted: list[int] = []
        self.refilled: list[int] = []
        self.staleness: list[int] = []
        self.saved = (self.ledger.state, list(self.trained))

    def tick(self) -> None:
        self.submit()
        self.generate()
        self.train()
        if not self.is_calm and self.random.random() < 0.01:
            self.kill_and_resume()
        self.check()

    def submit(self) -> None:
        while self.ledger.capacity and len(self.running) < self.num_seats:
            owed = self.ledger.state.owed
            refill_of = owed[0].entry.group_id if owed else None
            entry = self.ledger.submit("sums", self.random.randrange(1000), refill_of=refill_of)
            if refill_of is not None:
                self.refilled.append(refill_of)
            assert entry.group_id not in self.submitted
            self.submitted.add(entry.group_id)
            self.running[entry.group_id] = (self.answer_ticks(), None)

    def answer_ticks(self) -> int:
        """Long-tailed: one in ten takes ten times as long."""
        return self.random.randint(1, 6) * (10 if not self.is_calm and self.random.random() < 0.1 else 1)

    def generate(self) -> None:
        for group_id, (ticks, first) in list(self.running.items()):
            if first is None:
                lag = 1 if not self.is_calm and self.random.random() < 0.05 else 0
                first = max(0, self.ledger.state.version - lag)
            if ticks > 1:
                self.running[group_id] = (ticks - 1, first)
                if not self.is_calm and self.random.random() < 0.002:
                    self.evict([group_id], "failed")
                continue
            del self.running[group_id]
            seed = next(entry.environment_seed for entry in self.ledger.state.open if entry.group_id == group_id)
            versions = (first, max(first, self.ledger.state.version))
            group = make_group(group_id, versions=versions, environment_seed=seed)
            assert self.ledger.finish(group)
            assert not self.ledger.finish(group)
            if not self.is_calm and self.random.random() < 0.1:
                self.evict([group_id], "no signal")

    def evict(self, group_ids, reason) -> None:
        self.book(self.ledger.evict(group_ids, reason))

    def book(self, evictions) -> None:
        for eviction in evictions:
            self.evicted.append(eviction.entry.group_id)
            self.running.pop(eviction.entry.group_id, None)

    def train(self) -> None:
        if self.training_ticks:
            self.training_ticks -= 1
            if self.training_ticks == 0:
                self.trained.extend(entry.group_id for entry in self.ledger.state.training)
                self.book(self.ledger.advance(self.ledger.state.version + 1))
                self.saved = (self.ledger.state, list(self.trained))
            return
        owed_before = len(self.ledger.state.owed)
        taken = self.ledger.take(self.groups_per_version)
        self.book(self.ledger.state.owed[owed_before:])
        if taken:
            self.staleness.extend(self.checked_staleness(entry) for entry in taken)
            self.training_ticks = self.random.randint(1, 5)

    def checked_staleness(self, entry: Entry) -> int:
        assert entry.oldest_version is not None
        age = self.ledger.state.version - entry.oldest_version
        assert 0 <= age <= self.eta
        return age

    def kill_and_resume(self) -> None:
        """The process dies; sometimes the last checkpoint's state comes back, sometimes the one of this moment, at a later version."""
        from_checkpoint = self.random.random() < 0.5
        state, trained = self.saved if from_checkpoint else (self.ledger.state, self.trained)
        state = msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=LedgerState)
        if from_checkpoint:
            self.forget_since(state, trained)
        jump = self.random.choice([0, 0, 1, 30])
        self.ledger, evictions = Ledger.resume(
            state, state.version + jump, eta=self.eta, groups_per_version=self.groups_per_version
        )
        self.training_ticks = 0
        self.book(evictions)
        # The engines died too: nobody works on what was running.
        lost = [entry.group_id for entry in self.ledger.state.open if entry.finished_rank is None]
        self.evict(lost, "failed")
        self.running.clear()
        self.saved = (self.ledger.state, list(self.trained))

    def forget_since(self, state: LedgerState, trained: list[int]) -> None:
        """The books are the world's after the checkpoint: what came later has not happened."""
        self.trained = list(trained)
        owed = {eviction.entry.group_id for eviction in state.owed}
        self.submitted = {group_id for group_id in self.submitted if group_id < state.next_group_id}
        held = {entry.group_id for entry in (*state.open, *state.training)}
        self.evicted = sorted(self.submitted - set(self.trained) - held)
        self.refilled = sorted(set(self.evicted) - owed)

    def check(self) -> None:
        """Each group ever submitted is trained on, in training, open, or evicted, once; each evicted one is owed or refilled, once."""
        state = self.ledger.state
        held = [entry.group_id for entry in (*state.open, *state.training)]
        assert sorted([*self.trained, *self.evicted, *held]) == sorted(self.submitted)
        assert sorted([*self.refilled, *(eviction.entry.group_id for eviction in state.owed)]) == sorted(self.evicted)
        assert len(held) <= (self.eta + 1) * self.groups_per_version
        assert {entry.group_id for entry in state.open if entry.finished_rank is None} == set(self.running)


@pytest.mark.parametrize("eta", [0, 1, 2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_too_old_lost_or_counted_twice(seed: int, eta: int) -> None:
    run = Run(seed, eta, groups_per_version=3 + seed)
    for _ in range(600):
        run.tick()
    assert len(run.trained) > 40
    assert run.evicted
    assert len(run.trained) == len(set(run.trained))


@pytest.mark.parametrize("eta", [1, 2, 4])
def test_a_calm_run_wastes_little_and_uses_the_staleness_it_is_allowed(eta: int) -> None:
    run = Run(0, eta, groups_per_version=8, num_seats=64, is_calm=True)
    for _ in range(1000):
        run.tick()
    assert max(run.staleness) == eta
    assert len(run.evicted) <= 0.02 * len(run.submitted)


def test_in_step_every_token_is_of_the_version_that_trains() -> None:
    run = Run(0, 0, groups_per_version=8, is_calm=True)
    for _ in range(1000):
        run.tick()
    assert set(run.staleness) == {0}
    assert run.evicted == []


def test_a_run_follows_from_its_seed() -> None:
    def trained(seed: int) -> list[int]:
        run = Run(seed, 2, groups_per_version=4)
        for _ in range(200):
            run.tick()
        return run.trained

    assert trained(1) == trained(1) != trained(2)
