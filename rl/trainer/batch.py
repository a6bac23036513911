"""A batch: the rollouts a step learns from and what each is worth.

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
from rl.trajectory import Group, Trajectory, num_output_tokens
from wire.errors import RolloutError


@dataclass(frozen=True)
class Sample:
    """One trajectory as a row of tokens."""

    trajectory: Trajectory
    token_ids: tuple[int, ...]
    """Prompts, answers and the environment's replies in their order."""
    output_positions: tuple[int, ...]
    """Where in `token_ids` stands what the policy drew."""
    behaviour_logprobs: tuple[float, ...]
    rollout: int
    """Numbers the batch's rollouts; a forked one has several trajectories."""
    advantage: float
    """Of its rollout."""

    @property
    def prompt(self) -> tuple[int, ...]:
        """Of the first turn, which the rollouts of a group share; a fork has one of its own."""
        return self.trajectory.turns[0].prompt_token_ids

    @property
    def num_outputs(self) -> int:
        return len(self.output_positions)


@dataclass(frozen=True)
class Batch:
    samples: tuple[Sample, ...]
    shaped_rewards: tuple[float, ...]
    """Of each rollout that is learned from, the overlong punishment included."""
    dropped_group_ids: tuple[int, ...]
    """Groups that teach nothing; evict them, so that others take their place."""
    num_failed: int
    """Rollouts whose environment failed."""

    @property
    def rollouts(self) -> list[list[int]]:
        """The rows of `samples` by rollout."""
        rows: dict[int, list[int]] = {}
        for row, sample in enumerate(self.samples):
            rows.setdefault(sample.rollout, []).append(row)
        return list(rows.values())


def make_batch(groups: Sequence[Group], algorithm: AlgorithmSettings, *, max_output_tokens: int) -> Batch:
    """Whether rewards differ is asked of those in the record, before shaping, as in DAPO: length alone is no lesson.

    Rewards and lengths are a rollout's, and compared with those of other rollouts; where it has several trajectories, because it was
    forked, each has its advantage, and they weigh together as one.

    Raises RolloutError for rollouts drawn at temperature 0, which have no distribution, and for ones that are too long.
    """
    kept, dropped = with_signal(groups) if algorithm.drop_equal_rewards else (list(groups), [])
    numbered = [(number, rollout) for number, group in enumerate(kept) for rollout in group.scored_rollouts]
    rewards = [_shaped(rollout, algorithm, max_output_tokens) for _, rollout in numbered]
    worths_N = advantages(
        algorithm.recipe.advantage,
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor([number for number, _ in numbered], dtype=torch.int64),
        torch.tensor([num_output_tokens(rollout) for _, rollout in numbered], dtype=torch.int64),
    )
    rows = enumerate(zip(numbered, worths_N.tolist(), strict=True))
    return Batch(
        samples=tuple(_sample(each, number, advantage) for number, ((_, rollout), advantage) in rows for each in rollout),
        shaped_rewards=tuple(rewards),
        dropped_group_ids=tuple(group.group_id for group in dropped),
        num_failed=sum(len(group.rollouts) - len(group.scored_rollouts) for group in groups),
    )


def _shaped(rollout: Sequence[Trajectory], algorithm: AlgorithmSettings, max_output_tokens: int) -> float:
    first, num_tokens = rollout[0], num_output_tokens(rollout)
    who = f"sample {first.sample_index} of group {first.group_id}"
    if first.temperature == 0.0:
        raise RolloutError(f"{who} was drawn at temperature 0; a greedy answer has no probabilities to learn from")
    if num_tokens > max_output_tokens:
        raise RolloutError(
            f"{who} has {num_tokens} output tokens where max_output_tokens is {max_output_tokens}; "
            "give the trainer the generator's limit"
        )
    return first.reward + overlong_penalty(num_tokens, max_output_tokens, algorithm.overlong_buffer_tokens)


def _sample(trajectory: Trajectory, rollout: int, advantage: float) -> Sample:
    token_ids: list[int] = []
    positions: list[int] = []
    logprobs: list[float] = []
    for turn in trajectory.turns:
        token_ids.extend(turn.prompt_token_ids)
        positions.extend(range(len(token_ids), len(token_ids) + len(turn.output_token_ids)))
        token_ids.extend(turn.output_token_ids)
        logprobs.extend(turn.behaviour_logprobs)
    return Sample(trajectory, tuple(token_ids), tuple(positions), tuple(logprobs), rollout, advantage)
