"""Which problem a group is of: in turns, or as the curriculum chooses by what came of earlier ones."""

from __future__ import annotations

from collections import Counter

import msgspec
from rl_samples import make_group, make_trajectory

from rl.controllers.curriculum import CurriculumSettings
from rl.environments.interface import Problem
from rl.run.problems import Problems
from rl.run.record import Steering
from rl.trajectory import Group, RewardPart

SETTINGS = CurriculumSettings(num_problems=6, seed=1)


def of_problem(problem: Problem, rewards: tuple[float, ...]) -> Group:
    trajectories = [
        make_trajectory(
            sample_index=index,
            environment=problem.environment,
            environment_seed=problem.seed,
            reward_parts=(RewardPart("right", reward),),
        )
        for index, reward in enumerate(rewards)
    ]
    return Group(trajectories=tuple(trajectories))


def test_environments_take_turns_each_with_its_problems_in_order() -> None:
    problems = Problems(["a", "b"], None, {}, groups_per_round=4)
    asked = [problems.of(group_id) for group_id in range(5)]
    assert asked == [Problem("a", 0), Problem("b", 0), Problem("a", 1), Problem("b", 1), Problem("a", 2)]
    problems.note(make_group(0))
    assert problems.states == {}


def test_the_curriculum_asks_what_teaches_and_remembers_it_over_a_kill() -> None:
    problems = Problems(["a"], SETTINGS, {}, groups_per_round=6)
    for group_id in range(6 * 12):
        problem = problems.of(group_id)
        assert problem.seed < 6
        # Problems 0 and 1 teach, the others are always passed.
        problems.note(of_problem(problem, (0.0, 1.0) if problem.seed < 2 else (1.0,) * 8))
    saved = msgspec.msgpack.decode(msgspec.msgpack.encode(Steering(curricula=problems.states)), type=Steering)
    again = Problems(["a"], SETTINGS, saved.curricula, groups_per_round=2)
    asked = Counter(again.of(group_id).seed for group_id in range(20))
    assert asked[0] + asked[1] > 12


def test_what_the_curriculum_does_not_have_any_more_says_nothing() -> None:
    problems = Problems(["a"], SETTINGS, {}, groups_per_round=2)
    problems.note(of_problem(Problem("a", 6), (0.0, 1.0)))
    assert problems.of(0).seed < 6
    assert problems.states["a"].records == {}
