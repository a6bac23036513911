from __future__ import annotations

from math import exp
from random import Random

import msgspec
import pytest

from rl.controllers.curriculum import (
    Curriculum,
    CurriculumDecision,
    CurriculumSettings,
    GroupOutcome,
    Record,
    decide,
    pool_of,
)

GROUP_SIZE = 8


def settings(num_problems: int = 300, seed: int = 0, exploration: float = 0.2) -> CurriculumSettings:
    return CurriculumSettings(num_problems=num_problems, seed=seed, exploration=exploration)


class School:
    """Problems of evenly spread difficulty and a policy whose skill the test sets."""

    def __init__(self, num_problems: int, seed: int) -> None:
        self.num_problems = num_problems
        self.skill = 0.0
        self.random = Random(seed)

    def chance(self, problem: int) -> float:
        difficulty = 16.0 * problem / self.num_problems - 8.0
        return 1.0 / (1.0 + exp(difficulty - self.skill))

    def ask(self, problems: tuple[int, ...]) -> list[GroupOutcome]:
        outcomes = []
        for problem in problems:
            passed = sum(self.random.random() < self.chance(problem) for _ in range(GROUP_SIZE))
            outcomes.append(GroupOutcome(problem, passed, GROUP_SIZE - passed))
        return outcomes


def attend(
    school: School, config: CurriculumSettings, rounds: int, state: Curriculum | None = None, num_groups: int = 16
) -> tuple[Curriculum, list[CurriculumDecision], list[GroupOutcome]]:
    state = state or Curriculum()
    outcomes: list[GroupOutcome] = []
    decisions = []
    every = []
    for _ in range(rounds):
        state, decision = decide(config, state, outcomes, num_groups)
        outcomes = school.ask(decision.problems)
        decisions.append(decision)
        every += outcomes
    return state, decisions, every


def share_with_signal(outcomes: list[GroupOutcome]) -> float:
    return sum(0 < outcome.num_passed < GROUP_SIZE for outcome in outcomes) / len(outcomes)


def test_most_groups_carry_signal_once_the_problems_are_known() -> None:
    school = School(300, seed=1)
    _, _, outcomes = attend(school, settings(), 100)
    uniform = share_with_signal(school.ask(tuple(range(300)) * 4))
    assert share_with_signal(outcomes[-640:]) > 1.9 * uniform


def test_it_follows_a_policy_that_learns() -> None:
    school = School(300, seed=2)
    state, _, _ = attend(school, settings(), 80)
    school.skill = 5.0
    state, _, _ = attend(school, settings(), 80, state)
    _, _, outcomes = attend(school, settings(), 30, state)
    assert share_with_signal(outcomes) > 1.6 * share_with_signal(school.ask(tuple(range(300)) * 4))


@pytest.mark.parametrize("exploration", [0.0, 0.2, 1.0])
def test_the_exploration_share_is_kept(exploration: float) -> None:
    config = settings(num_problems=4000, exploration=exploration)
    learnable = {problem: Record(4.0, 4.0, 0) for problem in range(200)}
    state = Curriculum(0, learnable)
    explored = 0
    for _ in range(60):
        state, decision = decide(config, state, [], 16)
        explored += sum(problem not in learnable for problem in decision.problems)
    assert explored / (60 * 16) == pytest.approx(exploration, abs=0.03)


def test_what_was_put_aside_is_looked_at_again() -> None:
    config = settings(num_problems=40)
    records = {problem: Record(0.0, 40.0, 0) if problem < 20 else Record(4.0, 4.0, 0) for problem in range(40)}
    state, asked = Curriculum(0, records), set()
    for _ in range(40):
        state, decision = decide(config, state, [GroupOutcome(problem, 0, 8) for problem in asked if problem < 20], 8)
        asked = set(decision.problems)
        assert decision.pools["too_hard"] == 20
    seen: set[int] = set()
    for _ in range(40):
        state, decision = decide(config, state, [], 8)
        seen |= {problem for problem in decision.problems if problem < 20}
    assert len(seen) > 10


def test_what_is_remembered_fades_into_not_known() -> None:
    assert pool_of(Record(0.0, 24.0, 0)) == "too_hard"
    assert pool_of(Record(24.0, 0.0, 0)) == "too_easy"
    assert pool_of(Record(0.0, 24.0, 0).faded(200)) == "learnable"
    assert pool_of(Record(0.0, 3.0, 0)) == "learnable", "a few failures are not yet a reason"
    assert pool_of(None) == "unseen"
    assert Record(8.0, 4.0, 10).faded(60) == Record(4.0, 2.0, 60)


def test_the_same_seed_and_outcomes_choose_the_same() -> None:
    first = [decision.problems for decision in attend(School(300, seed=3), settings(seed=5), 20)[1]]
    second = [decision.problems for decision in attend(School(300, seed=3), settings(seed=5), 20)[1]]
    other = [decision.problems for decision in attend(School(300, seed=3), settings(seed=6), 20)[1]]
    assert first == second
    assert first != other


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped() -> None:
    state, _, outcomes = attend(School(300, seed=3), settings(), 10)
    restored = msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=Curriculum)
    assert restored == state
    assert decide(settings(), restored, outcomes[-16:], 16)[1] == decide(settings(), state, outcomes[-16:], 16)[1]


@pytest.mark.parametrize("state", [Curriculum(), Curriculum(0, {0: Record(0.0, 99.0, 0), 1: Record(99.0, 0.0, 0)})])
@pytest.mark.parametrize("num_groups", [0, 1, 5, 17])
def test_a_round_is_always_full(state: Curriculum, num_groups: int) -> None:
    for exploration in (0.0, 0.5, 1.0):
        _, decision = decide(settings(num_problems=5, exploration=exploration), state, [], num_groups)
        assert len(decision.problems) == num_groups
        assert len(set(decision.problems)) == min(num_groups, 5)


def test_pools_count_every_problem_once() -> None:
    state, decisions, _ = attend(School(300, seed=1), settings(), 50)
    assert sum(decisions[-1].pools.values()) == 300
    assert decisions[-1].pools["unseen"] < 300
    assert "learnable" in decisions[-1].reason
    assert state.num_rounds == 50


@pytest.mark.parametrize(
    "outcome", [GroupOutcome(-1, 1, 1), GroupOutcome(300, 1, 1), GroupOutcome(0, -1, 1), GroupOutcome(0, 1, -2)]
)
def test_outcomes_that_cannot_be_are_refused(outcome: GroupOutcome) -> None:
    with pytest.raises(ValueError, match="outcome"):
        decide(settings(), Curriculum(), [outcome], 4)
    with pytest.raises(ValueError, match="-1 groups"):
        decide(settings(), Curriculum(), [], -1)


def test_of_the_learnable_ones_those_that_teach_most_are_asked_most() -> None:
    records = {problem: Record(10.0, 10.0, 0) if problem < 100 else Record(4.0, 16.0, 0) for problem in range(200)}
    state, even = Curriculum(0, records), 0
    for _ in range(20):
        state, decision = decide(settings(num_problems=200, exploration=0.0), state, [], 20)
        even += sum(problem < 100 for problem in decision.problems)
    assert even / 400 == pytest.approx(0.6, abs=0.06)
