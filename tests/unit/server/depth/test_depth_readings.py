"""Readings: growth of cumulative counters."""

from __future__ import annotations

from sample_messages import engine_stats

from server.depth.readings import Readings, Steps
from server.tally import Tally
from wire.messages import AcceptanceCount, EngineStats, StepTime


def stats(epoch: str, num_steps: int, version: int = 0, **tenants: int) -> EngineStats:
    """`num_steps` of 10 ms alone at K=1; every tenant with its number of accepted proposals."""
    counts = [
        AcceptanceCount(
            draft_version=version,
            tenant=tenant,
            domain="d",
            num_verify_steps=num_steps,
            proposed_per_position=[num_steps],
            accepted_per_position=[num_accepted],
        )
        for tenant, num_accepted in tenants.items()
    ]
    times = [StepTime(bucket=1, depth=1, num_steps=num_steps, total_s=num_steps / 100)]
    return engine_stats(*counts, engine_epoch=epoch, draft_version=version, step_times=times)


def test_a_reading_is_what_was_added_over_all_tenants() -> None:
    readings = Readings()
    readings.take(stats("e", 100, a=10, b=20))
    reading = readings.take(stats("e", 150, a=15, b=40))
    assert reading.tally == Tally(100, (100,), (25,))
    assert reading.steps == {(1, 1): Steps(50, 0.5)}
    assert readings.take(stats("e", 150, a=15, b=40)).steps == {}


def test_what_was_counted_before_the_first_message_is_not_news() -> None:
    reading = Readings().take(stats("e", 1000, a=900))
    assert (reading.steps, reading.tally) == ({}, Tally())


def test_a_restarted_engine_counts_from_zero() -> None:
    readings = Readings()
    readings.take(stats("e", 1000, a=900))
    reading = readings.take(stats("f", 30, a=3))
    assert reading.tally == Tally(30, (30,), (3,))
    assert reading.steps[1, 1].num_steps == 30


def test_only_the_active_drafts_verdicts_count() -> None:
    readings = Readings()
    readings.take(stats("e", 100, a=90))
    reading = readings.take(stats("e", 120, version=1, a=5))
    assert (reading.draft_version, reading.tally) == (1, Tally(120, (120,), (5,)))
