"""What a finished rollout earns in a run, and what the reward model learns from the batches that are trained on.

Scores are given once, when a group finishes, by the model as it is then: they are in the group's record. The model learns after each step
of the trainer, from pairs that are on disk with the step's batch, so that a killed run has it learn the same things again. Of the step that
the kill cut off, it learns anew from the groups that are there still: ones without signal may have been evicted by then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from msgspec.structs import replace

from rl.config import RunSettings
from rl.environments.interface import Action
from rl.environments.pool import EnvironmentPool
from rl.generator.rendering import TargetText
from rl.rewards.claims import Claim
from rl.rewards.combination import combine
from rl.rewards.cooper import Answer, Lesson, RewardModelReport, Rule, learn, lesson_of
from rl.rewards.reward_model import RewardModel
from rl.run.rule import is_right, problem_of, would_be_right
from rl.trajectory import Group, RewardPart, Trajectory

MODEL = "reward_model"
"""The reward part that is its score."""


class Rewards:
    """model: None where rules are all there is."""

    def __init__(self, settings: RunSettings, model: RewardModel | None, pool: EnvironmentPool, target: TargetText) -> None:
        self._settings, self._model, self._pool, self._target = settings, model, pool, target

    def give(self, group: Group) -> Group:
        """With the weights of this run, and the model's score where the environment knows the right answer."""
        parts = {trajectory.sample_index: self._parts(rollout) for rollout in group.scored_rollouts for trajectory in rollout}
        trajectories = [
            replace(trajectory, reward_parts=parts.get(trajectory.sample_index, trajectory.reward_parts))
            for trajectory in group.trajectories
        ]
        return Group(trajectories=tuple(trajectories))

    async def lesson(self, batch: Sequence[Group], *, step: int) -> Lesson:
        """Of the batch that is about to be trained on."""
        if self._model is None:
            return Lesson()
        answers = await asyncio.to_thread(self._answers, batch)
        return await lesson_of(answers, step, num_workers=self._settings.num_workers)

    def learn(self, lesson: Lesson) -> RewardModelReport | None:
        """None without a model."""
        if self._model is None or self._settings.reward_model is None:
            return None
        return learn(self._model, lesson, self._settings.reward_model)

    def state(self) -> bytes:
        """Of the model, for a checkpoint; empty without one."""
        return self._model.state() if self._model is not None else b""

    def _parts(self, rollout: Sequence[Trajectory]) -> tuple[RewardPart, ...]:
        """The model's is one like the others: `[rl.reward]` may name it."""
        parts, settings = rollout[0].reward_parts, self._settings
        if self._model is None or settings.reward_model is None or rollout[0].reference is None:
            return combine(parts, settings.reward)
        judged = RewardPart(MODEL, self._model.score(self._claim(rollout)))
        share = settings.reward_model.weight
        return tuple(
            replace(part, weight=part.weight * (share if part.name == MODEL else 1.0 - share))
            for part in combine((*parts, judged), settings.reward)
        )

    def _claim(self, rollout: Sequence[Trajectory]) -> Claim:
        return Claim(rollout[0].reference or "", self._actions(rollout)[-1].text)

    def _answers(self, batch: Sequence[Group]) -> list[tuple[Answer, Rule]]:
        """Where there is a right answer. A large batch's tokens take seconds to decode, in which streams of rollouts must be read."""
        rollouts = [rollout for group in batch for rollout in group.scored_rollouts if rollout[0].reference is not None]
        return [(self._answer(rollout), self._rule(rollout)) for rollout in rollouts]

    def _answer(self, rollout: Sequence[Trajectory]) -> Answer:
        parts = rollout[0].reward_parts
        score = next((part.value for part in parts if part.name == MODEL), None)
        return Answer(self._claim(rollout), is_right(parts), score)

    def _rule(self, rollout: Sequence[Trajectory]) -> Rule:
        *before, last = self._actions(rollout)

        async def rule(completion: str) -> bool | None:
            other = Action(completion, self._target.encode(completion), is_truncated=last.is_truncated)
            return await would_be_right(self._pool, problem_of(rollout[0]), [*before, other])

        return rule

    def _actions(self, rollout: Sequence[Trajectory]) -> list[Action]:
        """As the environment saw them."""
        turns = [turn for trajectory in rollout for turn in trajectory.turns]
        return [
            Action(
                self._target.decode(turn.output_token_ids, special=False),
                turn.output_token_ids,
                is_truncated=turn.finish_reason == "length",
            )
            for turn in turns
        ]
