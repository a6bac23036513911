"""Environments and simulators with gymnasium's interface: `reset(seed=)` -> (observation, info), `step(action)` -> (observation,
reward, terminated, truncated, info). The interface is all that is needed; gymnasium itself is not imported.

Every episode has an instance of its own, so that they can be played side by side.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any, Literal, Protocol

from pydantic import Field, model_validator

from rl.environments.interface import Action, Chat, ChatMessage, EnvironmentFailed, Observation, Scored, Split, Step, Tokens
from rl.environments.settings import EnvironmentConfig
from rl.environments.splits import seed_in_split
from rl.trajectory import RewardPart
from wire.errors import ConfigError


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
    """A system message, before the first observation. Without one, an observation that is a list of whole numbers is token ids."""
    max_turns: int = Field(default=32, ge=1)

    @model_validator(mode="after")
    def _checked(self) -> GymConfig:
        if not self.reward_range[0] < self.reward_range[1]:
            raise ValueError(f"reward_range goes from low to high, got {list(self.reward_range)}")
        if ":" not in self.factory:
            raise ValueError(f"factory is module:callable, got {self.factory!r}")
        words = [_word(name) for name in self.actions]
        if "" in words or len(set(words)) < len(words):
            raise ValueError(f"actions differ in more than capitals, spaces and full stops, got {', '.join(self.actions)}")
        return self


class Gym:
    def __init__(self, config: GymConfig) -> None:
        """Raises ConfigError where the factory cannot be imported."""
        self._config = config
        self._make = _factory(config.factory)

    async def reset(self, seed: int, split: Split) -> GymEpisode:
        """Held-out episodes have seeds of their own; whether a simulator makes other worlds of them is its affair."""
        own_seed = seed_in_split(seed, split)
        instance = self._make(**self._config.parameters)
        try:
            observation, _ = instance.reset(seed=own_seed)
            return GymEpisode(self._config, instance, observation)
        except BaseException:
            instance.close()
            raise

    async def close(self) -> None:
        """Episodes close their instances."""


class GymEpisode:
    def __init__(self, config: GymConfig, instance: GymEnvironment, observation: Any) -> None:
        self._config = config
        self._instance = instance
        first = _seen(observation, takes_tokens=not config.instruction)
        system = (ChatMessage("system", config.instruction),) if config.instruction else ()
        self._first = Chat((*system, *first.messages)) if isinstance(first, Chat) else first
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
            hint = ChatMessage("user", f"There is no such action; there are {', '.join(self._config.actions)}.")
            return Step(None if is_last_turn else Chat((hint,)), is_last_turn, is_last_turn)
        observation, reward, is_terminated, is_cut, info = self._instance.step(taken)
        if not math.isfinite(reward):
            raise EnvironmentFailed(f"{self._config.factory} gives a reward of {reward}")
        self._return += float(reward)
        is_done = bool(is_terminated or is_cut or is_last_turn)
        self._is_truncated = is_done and not is_terminated
        plain = {key: value for key, value in info.items() if type(key) is str and type(value) in (str, int, float, bool)}
        seen = None if is_done else _seen(observation, takes_tokens=not self._config.instruction)
        return Step(seen, is_done, self._is_truncated, plain)

    async def score(self) -> Scored:
        low, high = self._config.reward_range
        value = min(1.0, max(0.0, (self._return - low) / (high - low)))
        info = {"return": self._return, "num_turns": self._num_turns, "num_unknown_actions": self._num_unknown}
        return Scored((RewardPart("return", value),), self._is_truncated, info)

    async def close(self) -> None:
        self._instance.close()

    def _action(self, text: str) -> tuple[bool, Any]:
        if not self._config.actions:
            return True, text
        word = _word(text)
        known = {_word(name): number for name, number in self._config.actions.items()}
        return word in known, known.get(word)


def _word(text: str) -> str:
    """What of a text names an action."""
    return text.strip().strip(".").strip().lower()


def _seen(observation: Any, *, takes_tokens: bool) -> Observation:
    """A list of whole numbers as token ids, anything else as the user's message; a tuple is a state of the simulator and no list."""
    if takes_tokens and isinstance(observation, list) and observation and all(type(token) is int for token in observation):
        return Tokens(tuple(observation))
    return Chat((ChatMessage("user", str(observation)),))


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
