from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from random import Random

import msgspec
import pytest

from rl.controllers.priority import (
    FIRST,
    LAST,
    MAX_PREEMPTIONS,
    USERS,
    GroupOutlook,
    Past,
    Priority,
    PriorityDecision,
    PriorityReading,
    Rollout,
    decide,
    expected_variance,
)

EVEN = GroupOutlook(num_unfinished=4, num_successes=2.0, num_failures=2.0, num_updates_left=5.0)


def rollout(name: str, group_id: int = 0, done: int = 0, expected: float = 100.0, *, runs: bool = False) -> Rollout:
    return Rollout(name, group_id, done, expected, runs)


def ask(
    rollouts: list[Rollout],
    groups: dict[int, GroupOutlook],
    *,
    num_slots: int,
    state: Priority | None = None,
    tokens_per_update: float | None = 100.0,
) -> tuple[Priority, PriorityDecision]:
    return decide(state or Priority(), PriorityReading(rollouts, groups, num_slots, tokens_per_update))


def better(first: tuple[Rollout, GroupOutlook], second: tuple[Rollout, GroupOutlook]) -> None:
    """The first one gets the only slot and the lower number, whichever way round they are listed."""
    rollouts = [replace(first[0], group_id=1), replace(second[0], group_id=2)]
    groups = {1: first[1], 2: second[1]}
    for listed in (rollouts, rollouts[::-1]):
        _, decision = ask(listed, groups, num_slots=1)
        assert decision.start == (first[0].rollout_id,)
        assert decision.priorities[first[0].rollout_id] < decision.priorities[second[0].rollout_id]


def test_each_reason_counts() -> None:
    better((rollout("b", done=80), EVEN), (rollout("a", done=10), EVEN))
    better((rollout("b"), replace(EVEN, num_unfinished=1)), (rollout("a"), EVEN))
    better((rollout("b"), EVEN), (rollout("a"), replace(EVEN, num_successes=9.0, num_failures=0.0)))
    better((rollout("b"), EVEN), (rollout("a"), replace(EVEN, num_successes=0.0, num_failures=9.0)))
    better((rollout("b"), replace(EVEN, num_updates_left=1.0)), (rollout("a"), EVEN))


def test_the_expected_variance_is_that_of_the_beta_distribution() -> None:
    random = Random(0)
    for num_successes, num_failures in ((0.0, 0.0), (3.0, 1.0), (0.0, 8.0)):
        draws = [random.betavariate(0.5 + num_successes, 0.5 + num_failures) for _ in range(20_000)]
        simulated = 4.0 * sum(p * (1.0 - p) for p in draws) / len(draws)
        assert expected_variance(num_successes, num_failures) == pytest.approx(simulated, rel=0.04)


def test_users_come_before_every_rollout() -> None:
    rollouts = [rollout(f"r{index}", done=index * 10, runs=index < 4) for index in range(8)]
    waited = Priority({"r1": Past(num_waited=10_000)})
    _, decision = ask(rollouts, {0: replace(EVEN, num_unfinished=1, num_updates_left=0.0)}, num_slots=4, state=waited)
    assert all(USERS < FIRST <= priority <= LAST for priority in decision.priorities.values())
    _, none = ask(rollouts, {0: EVEN}, num_slots=0)
    assert set(none.preempt) == {"r0", "r1", "r2", "r3"}
    assert none.start == ()
    assert ask(rollouts, {0: EVEN}, num_slots=-3)[1].preempt == none.preempt


def test_users_take_the_places_of_the_least_worthy() -> None:
    rollouts = [rollout("young", done=5, runs=True), rollout("old", done=90, runs=True)]
    _, decision = ask(rollouts, {0: EVEN}, num_slots=1)
    assert decision.preempt == ("young",)


def test_a_preemption_needs_a_margin_and_spares_the_nearly_finished() -> None:
    groups = {1: EVEN, 2: replace(EVEN, num_unfinished=1)}
    newcomer = rollout("last", 2)
    assert ask([rollout("first", 1, runs=True), newcomer], groups, num_slots=1)[1].preempt == ("first",)
    assert ask([rollout("first", 1, done=91, runs=True), newcomer], groups, num_slots=1)[1].preempt == ()
    slightly = {1: EVEN, 2: replace(EVEN, num_unfinished=3)}
    assert ask([rollout("first", 1, runs=True), newcomer], slightly, num_slots=1)[1].preempt == ()


def test_what_was_preempted_often_is_left_alone() -> None:
    groups = {1: EVEN, 2: replace(EVEN, num_unfinished=1)}
    rollouts = [rollout("first", 1, runs=True), rollout("last", 2)]
    tired = Priority({"first": Past(num_preemptions=MAX_PREEMPTIONS)})
    assert ask(rollouts, groups, num_slots=1, state=tired)[1].preempt == ()
    assert ask(rollouts, groups, num_slots=0, state=tired)[1].preempt == ("first",), "users may"


def test_groups_that_cannot_finish_in_time_are_given_up_whole() -> None:
    groups = {1: replace(EVEN, num_updates_left=1.0), 2: EVEN}
    rollouts = [rollout("late", 1, done=10, expected=1000.0, runs=True), rollout("done soon", 1, done=90), rollout("other", 2)]
    _, decision = ask(rollouts, groups, num_slots=3)
    assert decision.hopeless_groups == (1,)
    assert decision.start == ("other",)
    assert decision.preempt == ()
    for unknown in (None, nan, 0.0, -5.0, inf):
        assert ask(rollouts, groups, num_slots=3, tokens_per_update=unknown)[1].hopeless_groups == ()
    never = {1: replace(EVEN, num_updates_left=inf), 2: EVEN}
    assert ask(rollouts, never, num_slots=3)[1].hopeless_groups == ()


def finish_times(num_slots_at: list[int], seed: int) -> dict[str, int]:
    """Rounds in which 40 rollouts of 10 groups finish; each round a running one makes 10 tokens."""
    random = Random(seed)
    lengths = {f"{group}/{index}": random.randint(20, 120) for group in range(10) for index in range(4)}
    done = dict.fromkeys(lengths, 0)
    running: set[str] = set()
    finished: dict[str, int] = {}
    state = Priority()
    for number, num_slots in enumerate(num_slots_at):
        left = [name for name in lengths if name not in finished]
        groups = {
            group: replace(
                EVEN,
                num_unfinished=sum(name.startswith(f"{group}/") for name in left),
                num_successes=float(group),
                num_failures=9.0 - group,
                num_updates_left=inf,
            )
            for group in range(10)
        }
        rollouts = [rollout(name, int(name.split("/")[0]), done[name], 70.0, runs=name in running) for name in left]
        state, decision = ask(rollouts, groups, num_slots=num_slots, state=state)
        running = (running - set(decision.preempt)) | set(decision.start)
        assert len(running) <= num_slots
        for name in sorted(running):
            done[name] += 10
            if done[name] >= lengths[name]:
                finished[name] = number
        running -= set(finished)
    return finished


def test_every_rollout_finishes_though_users_come_and_go() -> None:
    random = Random(4)
    finished = finish_times([random.choice([0, 2, 4, 6]) for _ in range(400)], seed=1)
    assert len(finished) == 40


def test_groups_become_whole_sooner_than_first_come_first_served() -> None:
    def mean_completion(finished: dict[str, int]) -> float:
        ends = [max(finished[f"{group}/{index}"] for index in range(4)) for group in range(10)]
        return sum(ends) / len(ends)

    # First come, first served over members dealt out round robin, as concurrent generation does: all groups end late.
    random = Random(1)
    lengths = {f"{group}/{index}": random.randint(20, 120) for group in range(10) for index in range(4)}
    order = [f"{group}/{index}" for index in range(4) for group in range(10)]
    slots, fifo = [0] * 4, {}
    for name in order:
        slot = slots.index(min(slots))
        slots[slot] += -(-lengths[name] // 10)
        fifo[name] = slots[slot] - 1
    assert mean_completion(finish_times([4] * 400, seed=1)) < mean_completion(fifo)


def test_it_is_deterministic_and_forgets_what_is_finished() -> None:
    rollouts = [rollout(f"r{index}", runs=index % 2 == 0) for index in range(6)]
    first, second = (ask(order, {0: EVEN}, num_slots=2) for order in (rollouts, rollouts[::-1]))
    assert first[1].start == second[1].start
    assert set(first[1].preempt) == set(second[1].preempt)
    later, _ = ask(rollouts[:2], {0: EVEN}, num_slots=2, state=first[0])
    assert set(later.pasts) == {"r0", "r1"}


@pytest.mark.parametrize(
    ("rollouts", "groups", "message"),
    [
        ([rollout("a", 7)], {0: EVEN}, "group 7"),
        ([rollout("a"), rollout("a")], {0: EVEN}, "twice"),
        ([rollout("a", done=-1)], {0: EVEN}, "-1 tokens"),
        ([rollout("a", expected=nan)], {0: EVEN}, "nan expected"),
        ([rollout("a")], {0: replace(EVEN, num_successes=-1.0)}, "no number"),
        ([rollout("a")], {0: replace(EVEN, num_updates_left=nan)}, "no number"),
    ],
)
def test_bad_input_is_refused(rollouts: list[Rollout], groups: dict[int, GroupOutlook], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ask(rollouts, groups, num_slots=1)


def test_a_group_past_its_bound_and_lengths_beyond_expectation_are_no_errors() -> None:
    groups = {0: replace(EVEN, num_updates_left=-2.0, num_unfinished=0)}
    _, decision = ask([rollout("a", done=500, expected=0.0)], groups, num_slots=1)
    assert decision.start == ("a",)


def test_the_state_survives_a_checkpoint() -> None:
    state, _ = ask([rollout("a"), rollout("b", runs=True)], {0: EVEN}, num_slots=0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=Priority) == state
    assert state.pasts["a"].num_waited == 1


def test_a_rollout_that_teaches_little_is_begun_though_better_ones_keep_coming() -> None:
    groups = {0: replace(EVEN, num_successes=0.0, num_failures=20.0, num_updates_left=inf), 1: replace(EVEN, num_unfinished=1)}
    state = Priority()
    for number in range(200):
        state, decision = ask([rollout("dull"), rollout(f"new {number}", 1)], groups, num_slots=1, state=state)
        if decision.start == ("dull",):
            break
    assert 10 < number < 190
