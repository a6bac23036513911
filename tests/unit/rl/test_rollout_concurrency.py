from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, nan
from random import Random

import msgspec
import pytest
from pydantic import ValidationError

from rl.controllers.concurrency import Concurrency, ConcurrencyDecision, ConcurrencyLimits, ConcurrencyReading, decide

LIMITS = ConcurrencyLimits(least=1, most=256)


def reading(**changes: float | None) -> ConcurrencyReading:
    sound = ConcurrencyReading(
        now_s=0.0, kv_used=0.3, num_running=16, num_queued=0, num_users=0, num_preempted=0.0, num_finished=0.0
    )
    return replace(sound, **changes)  # type: ignore[arg-type]


def after(readings: list[ConcurrencyReading], cap: int = 16) -> tuple[Concurrency, list[ConcurrencyDecision]]:
    state, decisions = Concurrency(cap), []
    for one in readings:
        state, decision = decide(LIMITS, state, one)
        decisions.append(decision)
    return state, decisions


def test_it_grows_by_a_quarter_per_turnover_while_kv_is_plentiful_and_the_cap_binds() -> None:
    _, decisions = after([reading(), reading(num_finished=15.0), reading(num_finished=16.0)])
    assert [decision.cap for decision in decisions] == [16, 16, 20]
    assert "grows" in decisions[-1].reason


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"kv_used": 0.61}, "KV was used"),
        ({"num_running": 12}, "does not bind"),
        ({"num_queued": 1}, "wait inside the engine"),
        ({"num_finished": None}, "turned over"),
    ],
)
def test_it_does_not_grow_without_each_of_the_reasons(changes: dict[str, float | None], why: str) -> None:
    _, decisions = after([reading(), reading(**{"num_finished": 16.0, **changes})])
    assert decisions[-1].cap == 16
    assert why in decisions[-1].reason


def test_kv_that_was_scarce_for_a_moment_of_the_turnover_counts() -> None:
    _, decisions = after([reading(), reading(kv_used=0.7, num_finished=8.0), reading(num_finished=16.0)])
    assert decisions[-1].cap == 16


def test_a_full_cache_is_trimmed_softly_and_then_hard() -> None:
    _, (soft,) = after([reading(kv_used=0.84)])
    assert (soft.cap, soft.num_taken_back) == (13, 0)
    _, (hard,) = after([reading(kv_used=0.95)])
    assert (hard.cap, hard.num_taken_back) == (11, 5)
    # While the engine drains to the trimmed cap nothing is trimmed once more.
    draining = [reading(kv_used=0.9 * running / 32, num_running=running) for running in (32, 30, 29)]
    assert [decision.cap for decision in after(draining, cap=32)[1]] == [24, 24, 24]


def test_rollouts_make_room_for_users() -> None:
    _, (decision,) = after([reading(kv_used=0.96, num_running=12, num_users=12)], cap=12)
    assert (decision.cap, decision.num_taken_back) == (5, 7)
    _, (least,) = after([reading(kv_used=1.0, num_running=2, num_users=40)], cap=12)
    assert (least.cap, least.num_taken_back) == (1, 1)


def test_a_preemption_cuts_and_a_repeat_cuts_deeper() -> None:
    readings = [reading(), reading(num_preempted=1.0), reading(num_preempted=2.0), reading(num_preempted=2.0)]
    _, decisions = after(readings)
    assert [decision.cap for decision in decisions] == [16, 12, 6, 6]
    _, decisions = after([reading(num_preempted=7.0), reading(num_preempted=0.0), reading(num_preempted=0.0)])
    assert [decision.cap for decision in decisions] == [16, 16, 16], "an engine that began anew preempted nothing"


def test_a_long_queue_cuts_when_it_lasts() -> None:
    _, decisions = after([reading(num_queued=9)] * 6)
    assert [decision.cap for decision in decisions] == [16] * 5 + [14]
    _, decisions = after([*[reading(num_queued=9)] * 5, reading(), *[reading(num_queued=9)] * 5])
    assert decisions[-1].cap == 16


def test_silence_ends_growth_until_a_whole_new_turnover() -> None:
    quiet = [reading(), reading(now_s=16.0, num_finished=400.0), reading(now_s=17.0, num_finished=415.0)]
    _, decisions = after([*quiet, reading(now_s=18.0, num_finished=416.0)])
    assert [decision.cap for decision in decisions] == [16, 16, 16, 20]


@pytest.mark.parametrize("bad", [None, nan, inf, -0.5, 1.5])
def test_a_reading_without_kv_changes_nothing(bad: float | None) -> None:
    state, decisions = after([reading(), reading(kv_used=bad, num_preempted=50.0, num_finished=50.0)])
    assert state == after([reading()])[0]
    assert (decisions[-1].cap, decisions[-1].num_taken_back) == (16, 0)


@pytest.mark.parametrize("changes", [{"num_running": -1}, {"num_users": -4}, {"now_s": nan}, {"now_s": -1.0}])
def test_absurd_counts_and_times_change_nothing(changes: dict[str, float]) -> None:
    _, decisions = after([reading(now_s=5.0), reading(**{"now_s": 6.0, "kv_used": 0.99, **changes})])
    assert decisions[-1].cap == 16


@dataclass
class Engine:
    """Rollouts that finish one by one; above a full cache the engine preempts. Each holds `kv_each` of it."""

    kv_each: float
    num_users: int = 0
    running: int = 0
    preempted: float = 0.0
    finished: float = 0.0
    now_s: float = 0.0

    def poll(self, cap: int, random: Random) -> ConcurrencyReading:
        self.now_s += 1.0
        gone = min(self.running, max(1, round(self.running * random.uniform(0.15, 0.25))))
        self.finished += gone
        self.running = max(self.running - gone, cap)
        used = (self.running + self.num_users) * self.kv_each * random.uniform(0.97, 1.03)
        if used > 1.0:
            self.preempted += 1.0
        return reading(
            now_s=self.now_s,
            kv_used=min(used, 1.0),
            num_running=self.running,
            num_users=self.num_users,
            num_preempted=self.preempted,
            num_finished=self.finished,
        )


def drive(engine: Engine, state: Concurrency, number: int, random: Random) -> tuple[Concurrency, list[int]]:
    caps = []
    for _ in range(number):
        state, decision = decide(LIMITS, state, engine.poll(state.cap, random))
        engine.running = max(engine.running - decision.num_taken_back, 0)
        caps.append(decision.cap)
    return state, caps


def test_it_finds_what_the_engine_holds_and_stays_there() -> None:
    random, engine = Random(1), Engine(kv_each=1 / 100)
    state, _ = drive(engine, Concurrency(4), 200, random)
    before = engine.preempted
    _, caps = drive(engine, state, 400, random)
    assert min(caps) >= 55
    assert max(caps) <= 82
    assert engine.preempted == before


def test_users_who_come_get_room_and_rollouts_come_back_when_they_leave() -> None:
    random, engine = Random(2), Engine(kv_each=1 / 100)
    state, _ = drive(engine, Concurrency(4), 200, random)
    engine.num_users = 50
    state, with_users = drive(engine, state, 60, random)
    assert max(with_users[10:]) + engine.num_users <= 82
    engine.num_users = 0
    _, without = drive(engine, state, 300, random)
    assert without[-1] >= 55


def test_a_small_engine_is_never_left_without_rollouts() -> None:
    random, engine = Random(3), Engine(kv_each=0.7)
    _, caps = drive(engine, Concurrency(8), 100, random)
    assert set(caps[20:]) <= {1, 2}


def test_the_state_survives_a_checkpoint() -> None:
    state, _ = after([reading(), reading(num_preempted=1.0)])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=Concurrency) == state
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(Concurrency(3)), type=Concurrency) == Concurrency(3)


def test_a_range_that_is_none_is_refused() -> None:
    with pytest.raises(ValidationError, match="is no range"):
        ConcurrencyLimits(least=5, most=4)


def test_above_half_of_a_wall_it_grows_in_small_steps_until_the_wall_is_held_to_be_gone() -> None:
    state, _ = after([reading(num_running=64), reading(num_running=64, num_preempted=1.0)], cap=64)
    assert (state.cap, state.careful_above) == (51, 32.0)
    caps, finished = [], 0.0
    for _ in range(11):
        finished += 100.0
        one = reading(num_running=state.cap, num_preempted=1.0, num_finished=finished)
        state, decision = decide(LIMITS, state, one)
        caps.append(decision.cap)
    assert caps == [51, 52, 53, 54, 55, 56, 57, 58, 59, 74, 93]
