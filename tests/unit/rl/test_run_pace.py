"""How far a rollout comes between two updates, whatever else stands idle."""

from __future__ import annotations

import pytest

from rl.controllers.priority import GroupOutlook, Priority, PriorityReading, Rollout, decide
from rl.run.pace import Pace


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_rollouts_speed_is_its_own_and_not_a_share_of_idle_seats() -> None:
    clock = Clock()
    pace = Pace(clock)
    clock.now_s = 60.0
    # 64 requests of 20 s with 200 tokens each: 10 tokens a second, 600 between updates that are a minute apart.
    assert pace.update(64 * 200, 64 * 20.0) == pytest.approx(600.0)
    clock.now_s = 90.0
    assert pace.update(64 * 200 + 500, 64 * 20.0 + 100.0) == pytest.approx(5.0 * 30.0)


def test_an_interval_in_which_no_request_ends_keeps_the_speed() -> None:
    clock = Clock()
    pace = Pace(clock)
    assert pace.update(0, 0.0) is None
    clock.now_s = 10.0
    assert pace.update(100, 50.0) == pytest.approx(20.0)
    clock.now_s = 30.0
    assert pace.update(100, 50.0) == pytest.approx(40.0)
    clock.now_s = 40.0
    assert pace.update(100, 80.0) == pytest.approx(20.0)  # requests that brought nothing, as those of a dead engine


def test_rollouts_that_are_in_time_are_not_hopeless_where_seats_are_empty() -> None:
    """Of 256 seats 64 are used: a new group has two updates left and needs a third of one."""
    clock = Clock()
    pace = Pace(clock)
    clock.now_s = 60.0
    rollouts = [Rollout(f"0.{place}", 0, 0, 200.0, is_running=True) for place in range(8)]
    outlooks = {0: GroupOutlook(num_unfinished=8, num_successes=0, num_failures=0, num_updates_left=2.0)}
    reading = PriorityReading(rollouts, outlooks, 256, pace.update(64 * 200, 64 * 20.0))
    assert decide(Priority(), reading)[1].hopeless_groups == ()
