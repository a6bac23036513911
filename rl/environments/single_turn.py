"""The special case of one question and one answer: an environment only says how a problem is made and judged."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

from rl.environments.interface import Action, Chat, ChatMessage, Info, Observation, Scored, Split, Step
from rl.trajectory import RewardPart

P = TypeVar("P")


class SingleTurn(ABC, Generic[P]):
    """`P` is the environment's own idea of a problem, the right answer included; the model never sees it."""

    @abstractmethod
    def problem(self, seed: int, split: Split) -> P:
        """The problem of a seed; raises EnvironmentFailed."""

    @abstractmethod
    def question(self, problem: P) -> Observation:
        """What the model sees."""

    @abstractmethod
    async def judge(self, problem: P, action: Action) -> tuple[Sequence[RewardPart], Info]:
        """The verdict on an answer, and diagnostics."""

    def reference(self, problem: P) -> str | None:
        """The right answer in words, where there is one (`Scored.reference`)."""
        return None

    async def reset(self, seed: int, split: Split) -> SingleTurnEpisode[P]:
        return SingleTurnEpisode(self, self.problem(seed, split))

    async def close(self) -> None:
        """Nothing to give back, unless a subclass says otherwise."""


class SingleTurnEpisode(Generic[P]):
    def __init__(self, environment: SingleTurn[P], problem: P) -> None:
        self._environment = environment
        self._problem = problem
        self._action: Action | None = None

    @property
    def first(self) -> Step:
        return Step(self._environment.question(self._problem))

    async def step(self, action: Action) -> Step:
        self._action = action
        return Step(None, is_done=True, is_truncated=action.is_truncated)

    async def score(self) -> Scored:
        """Without an answer, the verdict is that on an empty one."""
        action = self._action or Action("", is_truncated=True)
        parts, info = await self._environment.judge(self._problem, action)
        reference = self._environment.reference(self._problem)
        return Scored(tuple(parts), is_truncated=action.is_truncated, info=info, reference=reference)

    async def close(self) -> None:
        """There is nothing to give back."""


def ask(text: str) -> Chat:
    """A question as one user message."""
    return Chat((ChatMessage("user", text),))
