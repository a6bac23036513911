"""The rule of an environment, asked again: what an episode would have been worth had it ended with another answer."""

from __future__ import annotations

from collections.abc import Sequence

from rl.environments.interface import Action, Excluded, Problem
from rl.environments.pool import EnvironmentPool
from rl.trajectory import RewardPart, Trajectory


def is_right(parts: Sequence[RewardPart]) -> bool:
    """An environment's first part says whether an answer is right; the others say how well it is said."""
    return parts[0].value == 1.0


async def would_be_right(pool: EnvironmentPool, problem: Problem, actions: Sequence[Action]) -> bool | None:
    """Play the problem once more; an episode that ends before its last action is judged as it ended. None where the environment is at
    fault."""
    episode = await pool.reset(problem)
    if isinstance(episode, Excluded):
        return None
    for action in actions:
        step = await episode.step(action)
        if isinstance(step, Excluded):
            return None
        if step.is_done:
            break
    scored = await episode.score()
    return None if isinstance(scored, Excluded) else is_right(scored.parts)


def problem_of(trajectory: Trajectory) -> Problem:
    return Problem(trajectory.environment, trajectory.environment_seed)
