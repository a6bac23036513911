"""A batch: the rollouts a step learns from, what each is worth, and how they are cut into forward passes.

Shape letters: N rollouts of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rl.algorithms.advantages import advantages
from rl.algorithms.config import AlgorithmSettings
from rl.algorithms.overlong import overlong_penalty
from rl.algorithms.sampling import with_signal
from rl.trajectory import Group, Trajectory
from wire.errors import RolloutError


@dataclass(frozen=True)
class Sample:
    """One rollout as a row of tokens."""

    trajectory: Trajectory
    token_ids: tuple[int, ...]
    """Prompts, answers and the environment's replies in their order."""
    output_positions: tuple[int, ...]
    """Where in `token_ids` stands what the policy drew."""
    behaviour_logprobs: tuple[float, ...]
    reward: float
    """Shaped: the overlong punishment included."""
    advantage: float

    @property
    def prompt(self) -> tuple[int, ...]:
        """Of the first turn, which the rollouts of a group share."""
        return self.trajectory.turns[0].prompt_token_ids

    @property
    def num_outputs(self) -> int:
        return len(self.output_positions)


@dataclass(frozen=True)
class Batch:
    samples: tuple[Sample, ...]
    dropped_group_ids: tuple[int, ...]
    """Groups that teach nothing; evict them, so that others take their place."""
    num_failed: int
    """Rollouts whose environment failed."""


def make_batch(groups: Sequence[Group], algorithm: AlgorithmSettings, *, max_output_tokens: int) -> Batch:
    """Whether rewards differ is asked of the environment's own, before shaping, as in DAPO: length alone is no lesson.

    Raises RolloutError for rollouts drawn at temperature 0, which have no distribution, and for ones that are too long.
    """
    kept, dropped = with_signal(groups) if algorithm.drop_equal_rewards else (list(groups), [])
    numbered = [(number, trajectory) for number, group in enumerate(kept) for trajectory in group.scored]
    rewards = [_shaped(trajectory, algorithm, max_output_tokens) for _, trajectory in numbered]
    worths_N = advantages(
        algorithm.recipe.advantage,
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor([number for number, _ in numbered], dtype=torch.int64),
        torch.tensor([trajectory.num_output_tokens for _, trajectory in numbered], dtype=torch.int64),
    )
    rows = zip(numbered, rewards, worths_N.tolist(), strict=True)
    return Batch(
        samples=tuple(_sample(trajectory, reward, advantage) for (_, trajectory), reward, advantage in rows),
        dropped_group_ids=tuple(group.group_id for group in dropped),
        num_failed=sum(len(group.trajectories) - len(group.scored) for group in groups),
    )


def _shaped(trajectory: Trajectory, algorithm: AlgorithmSettings, max_output_tokens: int) -> float:
    who = f"sample {trajectory.sample_index} of group {trajectory.group_id}"
    if trajectory.temperature == 0.0:
        raise RolloutError(f"{who} was drawn at temperature 0; a greedy answer has no probabilities to learn from")
    if trajectory.num_output_tokens > max_output_tokens:
        raise RolloutError(
            f"{who} has {trajectory.num_output_tokens} output tokens where max_output_tokens is {max_output_tokens}; "
            "give the trainer the generator's limit"
        )
    penalty = overlong_penalty(trajectory.num_output_tokens, max_output_tokens, algorithm.overlong_buffer_tokens)
    return trajectory.reward + penalty


def _sample(trajectory: Trajectory, reward: float, advantage: float) -> Sample:
    token_ids: list[int] = []
    positions: list[int] = []
    logprobs: list[float] = []
    for turn in trajectory.turns:
        token_ids.extend(turn.prompt_token_ids)
        positions.extend(range(len(token_ids), len(token_ids) + len(turn.output_token_ids)))
        token_ids.extend(turn.output_token_ids)
        logprobs.extend(turn.behaviour_logprobs)
    return Sample(trajectory, tuple(token_ids), tuple(positions), tuple(logprobs), reward, advantage)
