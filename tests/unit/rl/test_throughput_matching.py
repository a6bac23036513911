from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice, pairwise
from math import inf, nan

import msgspec
import pytest
from pydantic import ValidationError

from rl.controllers import matching
from rl.controllers.matching import Matching, MatchingDecision, MatchingReading
from rl.controllers.scaling import Scaling
from rl.controllers.simulate import (
    Interval,
    Simulation,
    World,
    matched,
    noisy,
    num_moves,
    slower_utilisation,
    trained_tokens_per_s,
)
from rl.controllers.split import LANES, Split, SplitLimits

START = Split(users=2, rollouts=8, trainer=8, learner=1)
LIMITS = SplitLimits(least=Split(1, 1, 1, 1), most=Split(19, 19, 19, 19))
FIXED_USERS = SplitLimits(least=Split(2, 1, 1, 1), most=Split(19, 19, 19, 19))
NO_LEARNER = {"learner_busy": 0.5}
"""A learner with time of its own asks for nothing."""


def world(trainer: float = 100.0, generator: float = 60.0, **settings: float) -> World:
    return World(
        trainer_tokens_per_s=trainer,
        generator_tokens_per_s=generator,
        **{"update_s": 0.5, "users_load": 1.5, **NO_LEARNER, **settings},  # type: ignore[arg-type]
    )


def run(
    worlds: World | Callable[[int], World],
    number: int = 40,
    *,
    limits: SplitLimits = FIXED_USERS,
    start: Split = START,
    seed: int = 1,
    spoil: Callable[[int, MatchingReading], MatchingReading] = lambda _number, reading: reading,
) -> tuple[list[Interval], list[MatchingDecision]]:
    steady = worlds
    at = (lambda _number: steady) if isinstance(steady, World) else steady
    pairs = list(islice(matched(at, limits, start, seed=seed, spoil=spoil), number))
    return [interval for interval, _ in pairs], [decision for _, decision in pairs]


def reading(**changes: float | None) -> MatchingReading:
    sound = MatchingReading(
        generator_tokens_per_s=300.0,
        generator_busy=1.0,
        trainer_tokens_per_s=300.0,
        trainer_busy=0.6,
        users_busy=0.75,
        users_queued=0.0,
        learner_busy=0.5,
    )
    return replace(sound, **changes)  # type: ignore[arg-type]


def after(readings: list[MatchingReading], state: Matching | None = None, limits: SplitLimits = LIMITS) -> list[Split]:
    state = state or Matching(START)
    splits = []
    for one in readings:
        state, decision = matching.decide(limits, state, one)
        splits.append(decision.split)
    return splits


@pytest.mark.parametrize(("trainer", "generator"), [(100.0, 60.0), (60.0, 100.0)])
@pytest.mark.parametrize("noise", [0.0, 0.05, 0.2])
@pytest.mark.parametrize("max_staleness", [1, 3])
def test_an_imbalance_is_matched_within_ten_updates(trainer: float, generator: float, noise: float, max_staleness: int) -> None:
    one = world(trainer, generator, max_staleness=max_staleness)
    intervals, _ = run(one, 50, spoil=noisy(7, noise))
    for first in (10, 20, 30, 40):
        assert slower_utilisation(intervals[first : first + 10]) >= 0.95
    assert max(interval.max_staleness for interval in intervals) <= max_staleness
    assert trained_tokens_per_s(intervals[10:]) > 1.15 * one.tokens_per_s_at(START)


def test_where_nothing_can_move_the_slower_side_still_never_waits() -> None:
    bound = SplitLimits(least=Split(0, 1, 1, 0), most=Split(0, 1, 1, 0))
    for rates in ((100.0, 60.0), (60.0, 100.0)):
        intervals, decisions = run(world(*rates, users_load=0.0), start=Split(0, 1, 1, 0), limits=bound)
        assert slower_utilisation(intervals[10:]) >= 0.95
        assert {decision.split for decision in decisions} == {Split(0, 1, 1, 0)}


def test_without_lag_the_generator_and_the_trainer_wait_for_each_other() -> None:
    intervals, _ = run(world(100.0, 100.0, max_staleness=0), 20)
    assert slower_utilisation(intervals[10:]) < 0.95, "a simulation in which nothing can go wrong proves nothing"
    assert max(interval.max_staleness for interval in intervals) == 0


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("rates", [(100.0, 60.0), (60.0, 100.0), (80.0, 80.0), (100.0, 97.0)])
def test_it_settles_and_does_not_swing(rates: tuple[float, float], noise: float) -> None:
    intervals, _ = run(world(*rates), 160, spoil=noisy(5, noise))
    assert num_moves(intervals) <= (2 if noise <= 0.1 else 12)
    assert num_moves(intervals[80:]) <= (0 if noise <= 0.1 else 4)


def test_units_that_bring_less_than_in_proportion_do_not_make_it_swing() -> None:
    one = world(90.0, 90.0, generator_exponent=0.4)
    intervals, _ = run(one, 240)
    assert num_moves(intervals) <= 12
    assert num_moves(intervals[120:]) <= 3
    best = max(one.tokens_per_s_at(START.moved("trainer", "rollouts", number)) for number in range(-7, 8))
    assert trained_tokens_per_s(intervals[30:]) >= 0.9 * best


def test_two_splits_of_which_each_looks_better_from_the_other_are_not_swung_between() -> None:
    # Whatever the split, the side with fewer units seems to be the slower one by far.
    state = Matching(START)
    splits = []
    for _ in range(400):
        split = state.split
        generator, trainer = (100.0, 400.0) if split.rollouts <= START.rollouts else (400.0, 100.0)
        one = reading(generator_tokens_per_s=generator, trainer_tokens_per_s=trainer, trainer_busy=1.0)
        state, decision = matching.decide(FIXED_USERS, state, one)
        splits.append(decision.split)
    changes = [number for number, (old, new) in enumerate(pairwise(splits)) if old != new]
    assert len(changes) <= 25
    assert sum(number > 200 for number in changes) <= 8


def test_a_load_that_changes_is_followed() -> None:
    def worlds(number: int) -> World:
        return world(100.0, 60.0) if number < 40 else world(60.0, 100.0)

    intervals, _ = run(worlds, 80, spoil=noisy(3, 0.05))
    assert intervals[39].split.rollouts > intervals[39].split.trainer
    assert intervals[79].split.rollouts < intervals[79].split.trainer
    assert slower_utilisation(intervals[50:60]) >= 0.95


def test_groups_without_signal_do_not_count_as_generated() -> None:
    intervals, _ = run(world(80.0, 80.0, useful_share=0.5), 40)
    split = intervals[-1].split
    assert split.rollouts / split.trainer == pytest.approx(2.0, rel=0.35)
    assert slower_utilisation(intervals[20:]) >= 0.95


def test_who_waits_is_said_in_words() -> None:
    _, decisions = run(world(100.0, 40.0), 3)
    assert decisions[2].waits == "trainer"
    assert "the trainer waits" in decisions[2].reason
    _, decisions = run(world(40.0, 100.0), 3)
    assert decisions[2].waits == "generator"
    assert "staleness gate" in decisions[2].reason


def test_users_get_a_unit_at_once_even_right_after_a_move() -> None:
    calm = [reading()] * 3
    moved, pressed, again = after([*calm, reading(users_queued=5.0), reading(users_queued=5.0)])[-3:]
    assert moved != START
    assert pressed.users == moved.users + 1
    assert again.users == moved.users + 2


@pytest.mark.parametrize("users_load", [0.0, 1.9, 5.0, 40.0])
def test_no_reading_takes_the_users_least(users_load: float) -> None:
    limits = SplitLimits(least=Split(2, 1, 1, 0), most=Split(6, 19, 19, 19))
    intervals, _ = run(world(100.0, 20.0, users_load=users_load), 120, limits=limits, start=replace(START, users=3))
    assert all(2 <= interval.split.users <= 6 for interval in intervals)
    assert {interval.split.total for interval in intervals} == {20}
    assert intervals[-1].split.users == {0.0: 2, 1.9: 3, 5.0: 6, 40.0: 6}[users_load]


def test_users_give_first_take_from_the_learner() -> None:
    (split,) = after([reading(users_busy=0.95)], Matching(replace(START, learner=3)))
    assert (split.users, split.learner) == (3, 2)


def test_users_who_flap_lend_ever_more_rarely() -> None:
    def worlds(number: int) -> World:
        return world(100.0, 40.0, users_load=0.1 if number % 12 < 8 else 4.0)

    limits = SplitLimits(least=Split(1, 1, 1, 1), most=Split(4, 19, 19, 19))
    intervals, _ = run(worlds, 240, limits=limits, start=replace(START, users=4))
    loans = [number for number in range(1, 240) if intervals[number].split.users < intervals[number - 1].split.users]
    assert loans
    assert loans[-1] < 100


def test_a_busy_learner_gets_what_the_faster_side_cannot_use() -> None:
    limits = SplitLimits(least=Split(2, 1, 1, 1), most=Split(2, 8, 19, 19))
    intervals, _ = run(world(100.0, 20.0, learner_busy=1.0), 60, limits=limits)
    last = intervals[-1]
    assert last.split.learner > START.learner
    assert last.split.rollouts == 8
    assert slower_utilisation(intervals[20:]) >= 0.95
    assert not last.is_trainer_slower
    assert num_moves(intervals[50:]) == 0


def test_the_learner_returns_what_the_slower_side_can_use() -> None:
    intervals, _ = run(world(100.0, 60.0), 40, start=Split(2, 6, 6, 5))
    assert intervals[-1].split.learner == 1


@pytest.mark.parametrize("bad", [None, nan, inf, -inf, -1.0])
@pytest.mark.parametrize("name", ["generator_tokens_per_s", "generator_busy", "trainer_tokens_per_s", "trainer_busy"])
def test_a_missing_or_absurd_reading_moves_nothing(name: str, bad: float | None) -> None:
    assert set(after([reading(**{name: bad})] * 20)) == {START}


@pytest.mark.parametrize("name", ["generator_tokens_per_s", "trainer_tokens_per_s", "generator_busy", "trainer_busy"])
def test_a_rate_of_zero_moves_nothing(name: str) -> None:
    assert set(after([reading(**{name: 0.0})] * 20)) == {START}


@pytest.mark.parametrize("bad", [None, nan, -3.0, inf])
def test_users_of_whom_nothing_is_known_lend_nothing_and_take_nothing(bad: float | None) -> None:
    splits = after([reading(users_busy=bad, users_queued=bad)] * 60)
    assert {split.users for split in splits} == {2}


def test_readings_that_are_lost_now_and_then_only_delay() -> None:
    def spoil(number: int, one: MatchingReading) -> MatchingReading:
        match number % 4:
            case 0:
                return replace(one, trainer_busy=None)
            case 1:
                return replace(one, generator_tokens_per_s=nan)
            case _:
                return one

    intervals, _ = run(world(100.0, 60.0), 60, spoil=spoil)
    assert intervals[-1].split.rollouts == 10
    assert num_moves(intervals) == 1


def test_one_wild_reading_in_five_changes_nothing() -> None:
    def spoil(number: int, one: MatchingReading) -> MatchingReading:
        return replace(one, trainer_tokens_per_s=1e9 if number % 10 == 0 else 1e-9) if number % 5 == 0 else one

    intervals, _ = run(world(80.0, 80.0), 100, spoil=spoil)
    assert num_moves(intervals) == 0


def test_measured_scaling_outlives_a_change_of_load() -> None:
    scaling = Scaling().after_move((8, 400.0), (10, 410.0))
    assert scaling.capacity(10, now_units=8, now_capacity=200.0) == pytest.approx(205.0)
    assert scaling.capacity(8, now_units=10, now_capacity=41.0) == pytest.approx(40.0)
    assert scaling.capacity(16, now_units=8, now_capacity=200.0) == pytest.approx(400.0)
    chained = scaling.after_move((10, 820.0), (12, 1640.0))
    assert chained.capacity(12, now_units=8, now_capacity=1.0) == pytest.approx(2.05)


def test_the_state_survives_a_checkpoint() -> None:
    state = Matching(START)
    for one in [reading()] * 6 + [reading(users_queued=1.0)] + [reading()] * 3:
        state, _ = matching.decide(LIMITS, state, one)
    assert state.generator_scaling.relative or state.before_move
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=Matching) == state


def test_limits_that_cannot_be_met_are_refused() -> None:
    with pytest.raises(ValidationError, match="a unit each"):
        SplitLimits(least=Split(0, 0, 1, 0), most=Split(1, 1, 1, 1))
    with pytest.raises(ValidationError, match="users would have"):
        SplitLimits(least=Split(2, 1, 1, 0), most=Split(1, 1, 1, 1))
    with pytest.raises(ValueError, match="start from a split within"):
        matching.decide(FIXED_USERS, Matching(replace(START, users=1)), reading())


def test_the_simulation_makes_the_tokens_it_trains_on() -> None:
    simulation = Simulation(world(50.0, 80.0), START, seed=3)
    intervals = [simulation.interval() for _ in range(60)]
    made = sum(interval.generator_tokens for interval in intervals)
    trained = sum(interval.trainer_tokens for interval in intervals)
    assert trained == pytest.approx(60 * 32 * 1000.0, rel=0.05)
    assert made == pytest.approx(trained, rel=0.08)
    for interval in intervals:
        assert 0.0 < interval.trainer_busy_s <= interval.duration_s * (1 + 1e-9)
        assert 0.0 < interval.generator_busy_s <= interval.duration_s * (1 + 1e-9)


def test_lanes_are_the_fields_of_a_split() -> None:
    assert tuple(Split.__dataclass_fields__) == LANES


def test_the_interval_of_a_move_tells_nothing_of_the_new_split() -> None:
    state = Matching(START)
    for _ in range(3):
        state, _ = matching.decide(LIMITS, state, reading())
    assert state.split != START
    state, _ = matching.decide(LIMITS, state, reading())
    assert state.capacities == ()
    state, _ = matching.decide(LIMITS, state, reading())
    assert len(state.capacities) == 1


def test_what_units_bring_is_forgotten_ever_more_rarely() -> None:
    state = Matching(START, generator_scaling=Scaling({8: 1.0, 9: 1.0}), num_returns=2, num_quiet=63)
    state, _ = matching.decide(LIMITS, state, reading())
    assert state.generator_scaling == Scaling()
    assert (state.num_returns, state.memory, state.num_quiet) == (1, 128, 0)


@pytest.mark.parametrize(("faster_tokens_per_s", "learner"), [(310.0, 1), (330.0, 2)])
def test_the_learner_gets_no_unit_without_which_the_sides_would_be_equal(faster_tokens_per_s: float, learner: int) -> None:
    limits = SplitLimits(least=Split(2, 1, 1, 1), most=Split(2, 8, 3, 9))
    one = reading(generator_tokens_per_s=200.0, trainer_tokens_per_s=faster_tokens_per_s, trainer_busy=1.0, learner_busy=1.0)
    splits = after([one] * 3, Matching(Split(2, 8, 3, 1)), limits)
    assert splits[-1].learner == learner
