"""One rollout through its environment: reset, answer by answer, verdict."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from msgspec.structs import replace

from rl.environments.interface import EnvironmentFailed, Excluded, Observation, Problem, Scored
from rl.environments.pool import EnvironmentPool, RemoteEpisode
from rl.generator.config import GeneratorSettings
from rl.generator.rendering import Conversation, TargetText
from rl.generator.state import PartialTurn, PlayedTurn
from rl.generator.turns import RunningRollout, TurnFailed, Turns
from rl.trajectory import Timings, Trajectory, Turn
from wire.spec import SCHEMA_VERSION

T = TypeVar("T")


class Episodes:
    """Plays rollouts; what they are is written into them, so that another process can go on with it.

    clock: Unix time.
    """

    def __init__(
        self, settings: GeneratorSettings, pool: EnvironmentPool, target: TargetText, turns: Turns, clock: Callable[[], float]
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._target = target
        self._turns = turns
        self._clock = clock

    async def play(self, rollout: RunningRollout, problem: Problem) -> tuple[Trajectory, ...]:
        """Raises EnvironmentFailed where the environment is at fault, TurnFailed where an answer cannot be had."""
        episode = _counted(await self._pool.reset(problem))
        is_scored = False
        try:
            await self._converse(rollout, episode)
            generated_s = max(self._clock(), rollout.saved.submitted_s)
            scored = _counted(await episode.score())
            is_scored = True
        finally:
            if not is_scored:
                await episode.close()
        timings = Timings(
            submitted_s=rollout.saved.submitted_s, generated_s=generated_s, scored_s=max(self._clock(), generated_s)
        )
        return _trajectories(rollout, problem, scored, timings)

    async def _converse(self, rollout: RunningRollout, episode: RemoteEpisode) -> None:
        conversation = Conversation(self._target)
        known = list(rollout.saved.turns)
        step = episode.first
        while step.observation is not None:
            played = await self._answer(rollout, conversation, step.observation, known.pop(0) if known else None)
            if played is None:
                return
            step = _counted(await episode.step(conversation.answer(played.turn)))

    async def _answer(
        self, rollout: RunningRollout, conversation: Conversation, observation: Observation, known: PlayedTurn | None
    ) -> PlayedTurn | None:
        """The next turn, drawn or as it was drawn before; None where there is no room for one."""
        prompt = conversation.observe(observation)
        before = known.turn if known is not None else rollout.saved.partial
        if before is not None and before.prompt_token_ids != prompt.token_ids:
            raise EnvironmentFailed("it went another way when it was begun again from seed")
        if known is not None:
            return known
        max_tokens = self._room(rollout.saved.turns, conversation)
        if max_tokens < 1:
            if not rollout.saved.turns:
                raise TurnFailed(f"its prompt of {len(prompt.token_ids)} tokens leaves no room for an answer")
            return None
        if before is None:
            begun = PartialTurn(prompt_token_ids=prompt.token_ids, is_fork=prompt.is_fork)
            rollout.saved = replace(rollout.saved, partial=begun)
        played = await self._turns.draw(rollout, conversation.token_ids, max_tokens=max_tokens)
        rollout.saved = replace(rollout.saved, turns=(*rollout.saved.turns, played), partial=None)
        return played

    def _room(self, turns: tuple[PlayedTurn, ...], conversation: Conversation) -> int:
        num_drawn = sum(len(played.turn.output_token_ids) for played in turns)
        settings = self._settings
        return min(
            settings.max_turn_tokens,
            settings.max_output_tokens - num_drawn,
            settings.max_context_tokens - len(conversation.token_ids),
        )


def _counted(result: T | Excluded) -> T:
    """Raises EnvironmentFailed for an episode that takes no part in training."""
    if isinstance(result, Excluded):
        raise EnvironmentFailed(f"{result.reason}: {result.detail}")
    return result


def _trajectories(rollout: RunningRollout, problem: Problem, scored: Scored, timings: Timings) -> tuple[Trajectory, ...]:
    """One, and one more for each fork; `sample_index` and `forked_from` count within the rollout, until its group is complete."""
    parts: list[list[Turn]] = [[]]
    for played in rollout.saved.turns:
        if played.is_fork:
            parts.append([])
        parts[-1].append(played.turn)
    return tuple(
        Trajectory(
            schema_version=SCHEMA_VERSION,
            group_id=rollout.group_id,
            sample_index=number,
            environment=problem.environment,
            environment_seed=problem.seed,
            temperature=rollout.temperature,
            turns=tuple(part),
            reward_parts=scored.parts,
            timings=timings,
            forked_from=number - 1 if number else None,
            reference=scored.reference,
        )
        for number, part in enumerate(parts)
    )
