"""Environments and simulators with gymnasium's interface: `reset(seed=)` -> (observation, info), `step(action)` -> (observation,
reward, terminated, truncated, info). The interface is all that is needed; gymnasium itself is not imported.

Every episode has an instance of its own, so that they can be played side by side.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

from pydantic import Field, model_validator

from rl.environments.interface import Action, Chat, ChatMessage, EnvironmentFailed, Observation, Scored, Split, Step, Tokens
from rl.environments.settings import EnvironmentConfig
from rl.trajectory import RewardPart
from wire.errors import ConfigError

_HELDOUT_SEEDS_BEGIN = 1 << 30


class GymEnvironment(Protocol):
    def reset(self, *, seed: int) -> tuple[Any, dict[str, Any]]: ...
    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]: ...
    def close(self) -> None: ...


class GymConfig(EnvironmentConfig):
    kind: Literal["gym"] = "gym"
    factory: str
    """`module:callable` that makes an instance; with `parameters`, as `gymnasium:make` and `{id = "FrozenLake-v1"}`."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    reward_range: tuple[float, float]
    """The lowest and the highest sum of rewards of an episode; they become 0 and 1, and what lies beyond is clipped."""
    actions: dict[str, int] = Field(default_factory=dict)
    """What the model says -> the action of a discrete space. Empty: the environment takes text."""
    instruction: str = ""
    """A system message, before the first observation."""
    max_turns: int = Field(default=32, ge=1)

    @model_validator(mode="after")
    def _checked(self) -> GymConfig:
        if not self.reward_range[0] < self.reward_range[1]:
            raise ValueError(f"reward_range goes from low to high, got {list(self.reward_range)}")
        if ":" not in self.factory:
            raise ValueError(f"factory is module:callable, got {self.factory!r}")
        return self


class Gym:
    def __init__(self, config: GymConfig) -> None:
        """Raises ConfigError where the factory cannot be imported."""
        self._config = config
        self._make = _factory(config.factory)

    async def reset(self, seed: int, split: Split) -> GymEpisode:
        """Held-out episodes have seeds of their own; whether a simulator makes other worlds of them is its affair."""
        if seed >= _HELDOUT_SEEDS_BEGIN:
            raise EnvironmentFailed(f"seed {seed} is not below {_HELDOUT_SEEDS_BEGIN}")
        instance = self._make(**self._config.parameters)
        observation, _ = instance.reset(seed=seed + (_HELDOUT_SEEDS_BEGIN if split == "heldout" else 0))
        return GymEpisode(self._config, instance, observation)

    async def close(self) -> None:
        """Episodes close their instances."""


class GymEpisode:
    def __init__(self, config: GymConfig, instance: GymEnvironment, observation: Any) -> None:
        self._config = config
        self._instance = instance
        self._first = _seen(observation, config.instruction)
        self._return = 0.0
        self._num_turns = 0
        self._num_unknown = 0
        self._is_truncated = False

    @property
    def first(self) -> Step:
        return Step(self._first)

    async def step(self, action: Action) -> Step:
        """A word that is no action costs a turn, and the environment does not see it."""
        self._num_turns += 1
        is_last_turn = self._num_turns >= self._config.max_turns
        is_known, taken = self._action(action.text)
        if not is_known:
            self._num_unknown += 1
            self._is_truncated = is_last_turn
            hint = _seen(f"There is no such action; there are {', '.join(self._config.actions)}.", "")
            return Step(None if is_last_turn else hint, is_last_turn, is_last_turn)
        observation, reward, is_terminated, is_cut, info = self._instance.step(taken)
        if not math.isfinite(reward):
            raise EnvironmentFailed(f"{self._config.factory} gives a reward of {reward}")
        self._return += float(reward)
        is_done = bool(is_terminated or is_cut or is_last_turn)
        self._is_truncated = is_done and not is_terminated
        plain = {key: value for key, value in info.items() if type(value) in (str, int, float, bool)}
        return Step(None if is_done else _seen(observation, ""), is_done, self._is_truncated, plain)

    async def score(self) -> Scored:
        self._instance.close()
        low, high = self._config.reward_range
        value = min(1.0, max(0.0, (self._return - low) / (high - low)))
        info = {"return": self._return, "num_turns": self._num_turns, "num_unknown_actions": self._num_unknown}
        return Scored((RewardPart("return", value),), self._is_truncated, info)

    def _action(self, text: str) -> tuple[bool, Any]:
        if not self._config.actions:
            return True, text
        word = text.strip().strip(".").lower()
        known = {name.lower(): number for name, number in self._config.actions.items()}
        return word in known, known.get(word)


def _seen(observation: Any, instruction: str) -> Observation:
    """Text as the user's message, a list of whole numbers as token ids, anything else as its text."""
    is_tokens = isinstance(observation, Sequence) and not isinstance(observation, str) and len(observation) > 0
    if is_tokens and all(type(token) is int for token in observation) and not instruction:
        return Tokens(tuple(observation))
    system = (ChatMessage("system", instruction),) if instruction else ()
    return Chat((*system, ChatMessage("user", str(observation))))


def _factory(path: str) -> Callable[..., GymEnvironment]:
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"cannot import the environment {path!r}: {error}") from error
    if not callable(found):
        raise ConfigError(f"{path!r} is {found!r}, which makes no environment")
    made: Callable[..., GymEnvironment] = found
    return made
