"""Which groups make a batch: those with signal, in the ledger's order, with others in place of those without."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from generator_rig import run
from rl_samples import make_group

from rl.run.batches import MAX_SILENT, Batches
from rl.run.history import GroupEvent
from rl.run.lines import Lines
from rl.run.told_ledger import ToldLedger
from rl.staleness.ledger import LedgerState
from rl.trajectory import Group

SIGNAL, EQUAL = (0.0, 1.0), (1.0, 1.0)


def make_ledger(history: Lines[GroupEvent] | None = None, *, eta: int = 1) -> ToldLedger:
    ledger = ToldLedger(LedgerState(version=3), eta=eta, groups_per_version=2)
    if history is not None:
        ledger.tell_to(history, lambda: 5.0)
    return ledger


def make_batches(ledger: ToldLedger, waiting: Sequence[Group] = (), *, drop_equal_rewards: bool = True) -> Batches:
    return Batches(ledger, groups_per_step=2, drop_equal_rewards=drop_equal_rewards, waiting=waiting, on_evict=lambda: None)


def finish(ledger: ToldLedger, batches: Batches, rewards: Sequence[float], *, refill_of: int | None = None) -> int:
    entry = ledger.submit("sums", 7, refill_of=refill_of)
    group = make_group(entry.group_id, rewards=rewards)
    assert ledger.finish(group)
    batches.add(group)
    return entry.group_id


def test_a_batch_waits_until_enough_groups_have_finished() -> None:
    async def scenario() -> None:
        ledger = make_ledger()
        batches = make_batches(ledger)
        wanted = asyncio.create_task(batches.next())
        finish(ledger, batches, SIGNAL)
        await asyncio.sleep(0)
        assert not wanted.done()
        assert [group.group_id for group in batches.waiting] == [0]
        finish(ledger, batches, SIGNAL)
        groups, num_with_signal = await wanted
        assert ([group.group_id for group in groups], num_with_signal) == ([0, 1], 2)
        assert [entry.group_id for entry in ledger.state.training] == [0, 1]
        assert batches.waiting == ()

    run(scenario())


def test_a_group_without_signal_is_evicted_at_once_and_another_fills_its_place() -> None:
    async def scenario() -> None:
        ledger = make_ledger()
        batches = make_batches(ledger)
        finish(ledger, batches, EQUAL)
        finish(ledger, batches, SIGNAL)
        wanted = asyncio.create_task(batches.next())
        for _ in range(3):
            await asyncio.sleep(0)
        assert not wanted.done()
        assert [(eviction.entry.group_id, eviction.reason) for eviction in ledger.state.owed] == [(0, "no signal")]
        finish(ledger, batches, SIGNAL, refill_of=0)
        groups, num_with_signal = await wanted
        assert ([group.group_id for group in groups], num_with_signal) == ([1, 2, 0], 2)
        assert [entry.group_id for entry in ledger.state.training] == [1, 2]

    run(scenario())


def test_where_nothing_has_signal_a_batch_ends_all_the_same() -> None:
    async def scenario() -> None:
        ledger = make_ledger()
        batches = make_batches(ledger)
        wanted = asyncio.create_task(batches.next())
        while not wanted.done():
            owed = ledger.state.owed[0].entry.group_id if ledger.state.owed else None
            if ledger.capacity:
                finish(ledger, batches, EQUAL, refill_of=owed)
            await asyncio.sleep(0)
        groups, num_with_signal = await wanted
        assert num_with_signal == 0
        assert len(groups) == MAX_SILENT * 2
        assert ledger.state.training == ()

    run(scenario())


def test_equal_rewards_count_where_they_are_not_to_be_dropped() -> None:
    async def scenario() -> None:
        ledger = make_ledger()
        batches = make_batches(ledger, drop_equal_rewards=False)
        for _ in range(2):
            finish(ledger, batches, EQUAL)
        assert (await batches.next())[1] == 2

    run(scenario())


def test_groups_that_become_too_old_while_they_wait_are_forgotten() -> None:
    async def scenario() -> None:
        ledger = make_ledger(eta=0)
        batches = make_batches(ledger)
        finish(ledger, batches, SIGNAL)
        ledger.advance(4)
        assert batches.waiting == ()
        for _ in range(2):
            entry = ledger.submit("sums", 7)
            group = make_group(entry.group_id, versions=(4, 4))
            assert ledger.finish(group)
            batches.add(group)
        groups, _ = await batches.next()
        assert [group.group_id for group in groups] == [1, 2]

    run(scenario())


def test_the_history_tells_every_station_and_survives_a_torn_line(tmp_path: Path) -> None:
    async def scenario() -> None:
        history = Lines(tmp_path / "history.jsonl", GroupEvent)
        ledger = make_ledger(history)
        batches = make_batches(ledger)
        finish(ledger, batches, EQUAL)
        finish(ledger, batches, SIGNAL)
        wanted = asyncio.create_task(batches.next())
        for _ in range(3):
            await asyncio.sleep(0)
        kept_bytes = history.num_bytes
        finish(ledger, batches, SIGNAL, refill_of=0)
        await wanted
        ledger.advance(4)
        told = [(event.group_id, event.station) for event in history.read()]
        assert told == [
            (0, "submitted"),
            (0, "finished"),
            (1, "submitted"),
            (1, "finished"),
            (0, "taken"),
            (1, "taken"),
            (0, "evicted"),
            (2, "submitted"),
            (2, "finished"),
            (2, "taken"),
            (1, "trained"),
            (2, "trained"),
        ]
        by_place = {(event.group_id, event.station): event for event in history.read()}
        assert by_place[0, "evicted"].reason == "no signal"
        assert by_place[2, "submitted"].refill_of == 0
        assert by_place[2, "submitted"].attempt == 1
        assert by_place[2, "trained"].version == 4
        assert ledger.take_evicted() == {"no signal": 1}
        assert ledger.take_evicted() == {}
        with (tmp_path / "history.jsonl").open("ab") as file:
            file.write(b'{"at_s": 1.0, "grou')
        assert len(history.read()) == len(told)
        history.cut(kept_bytes)
        assert [(event.group_id, event.station) for event in history.read()] == told[:7]

    run(scenario())


@pytest.mark.parametrize("eta", [0, 2])
def test_a_resumed_ledger_tells_nothing_until_it_is_asked_to(tmp_path: Path, eta: int) -> None:
    ledger = make_ledger(eta=eta)
    ledger.submit("sums", 7)
    resumed, evictions = ToldLedger.resume(ledger.state, 5, eta=eta, groups_per_version=2)
    assert isinstance(resumed, ToldLedger)
    history = Lines(tmp_path / "history.jsonl", GroupEvent)
    resumed.tell_to(history)
    resumed.tell_evicted(evictions)
    assert [event.station for event in history.read()] == (["evicted"] if eta == 0 else [])
