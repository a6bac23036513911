"""What is forgotten of what was seen, by number and by age."""

from __future__ import annotations

import pytest

from server.routing.estimates import HALF_LIFE_S, LEARNING_RATE, MAX_STEP, Estimate


def test_of_what_is_seen_at_once_each_moves_the_estimate_by_the_same_share() -> None:
    estimate, expected_s = Estimate(1.0, seen_at_s=0.0), 1.0
    for seen_s in (2.0, 0.5, 1.5):
        estimate.learn(seen_s, now_s=0.0)
        expected_s += LEARNING_RATE * (seen_s - expected_s)
    assert estimate.value_s == pytest.approx(expected_s)


def test_after_a_long_silence_one_observation_counts_for_all_before() -> None:
    estimate = Estimate(1.0, seen_at_s=0.0)
    estimate.learn(2.0, now_s=HALF_LIFE_S)
    assert estimate.value_s == pytest.approx(2.0 - (1.0 - LEARNING_RATE) * 0.5)
    estimate.learn(3.0, now_s=100.0 * HALF_LIFE_S)
    assert estimate.value_s == pytest.approx(3.0)


def test_one_observation_is_bounded_even_then() -> None:
    for seen_s, expected_s in ((1000.0, MAX_STEP), (0.0, 1.0 / MAX_STEP)):
        estimate = Estimate(1.0, seen_at_s=0.0)
        estimate.learn(seen_s, now_s=100.0 * HALF_LIFE_S)
        assert estimate.value_s == pytest.approx(expected_s)


def test_what_looks_slow_fades_and_what_looks_fast_does_not() -> None:
    slow, fast = Estimate(9.0, seen_at_s=0.0), Estimate(0.5, seen_at_s=0.0)
    assert [slow.faded(1.0, now_s) for now_s in (0.0, HALF_LIFE_S, 2.0 * HALF_LIFE_S)] == pytest.approx([9.0, 5.0, 3.0])
    assert fast.faded(1.0, now_s=100.0 * HALF_LIFE_S) == 0.5
    assert slow.value_s == 9.0, "a look changes nothing"


def test_a_clock_that_stands_still_or_goes_back_forgets_nothing() -> None:
    estimate = Estimate(9.0, seen_at_s=5.0)
    assert estimate.faded(1.0, now_s=0.0) == 9.0
