"""Environments by the `kind` of their `[[environment]]` table. Nothing heavy is imported before one is built.

A new kind is one line here: its configuration and what builds it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rl.environments.code import Code, CodeConfig
from rl.environments.gym import Gym, GymConfig
from rl.environments.interface import Environment
from rl.environments.math import Math, MathConfig
from rl.environments.procedural import (
    Addition,
    AdditionConfig,
    Brevity,
    BrevityConfig,
    Maximum,
    MaximumConfig,
    UpperCase,
    UpperCaseConfig,
)
from rl.environments.reasoning_gym import ReasoningGym, ReasoningGymConfig
from rl.environments.settings import EnvironmentConfig
from rl.environments.tools import Tools, ToolsConfig
from rl.environments.verifiers import Verifiers, VerifiersConfig
from wire.errors import ConfigError


class Kind(NamedTuple):
    config: type[EnvironmentConfig]
    environment: Callable[[Any], Environment]
    """Takes a configuration of that type; raises ConfigError where this machine lacks what it needs."""


KINDS: dict[str, Kind] = {
    "addition": Kind(AdditionConfig, Addition),
    "brevity": Kind(BrevityConfig, Brevity),
    "code": Kind(CodeConfig, Code),
    "gym": Kind(GymConfig, Gym),
    "math": Kind(MathConfig, Math),
    "maximum": Kind(MaximumConfig, Maximum),
    "reasoning_gym": Kind(ReasoningGymConfig, ReasoningGym),
    "tools": Kind(ToolsConfig, Tools),
    "upper_case": Kind(UpperCaseConfig, UpperCase),
    "verifiers": Kind(VerifiersConfig, Verifiers),
}


def read_environments(tables: Sequence[Mapping[str, Any]], *, source: str) -> tuple[EnvironmentConfig, ...]:
    """The configurations of `[[environment]]` tables, in their order; raises ConfigError that names the table."""
    configs: list[EnvironmentConfig] = []
    for number, table in enumerate(tables, start=1):
        kind = table.get("kind")
        if not isinstance(kind, str) or kind not in KINDS:
            raise ConfigError(f"{source}: [[environment]] {number} has the kind {kind!r}; there are {', '.join(KINDS)}")
        configs.append(KINDS[kind].config.build(table, source=f"{source}: [[environment]] {number}"))
        names = [config.name for config in configs]
        if names.count(names[-1]) > 1:
            raise ConfigError(f"{source}: two environments are called {names[-1]!r}; give each a name of its own")
    return tuple(configs)


def build(config: EnvironmentConfig) -> Environment:
    """The environment of a configuration; raises ConfigError where this machine lacks what it needs."""
    (kind,) = (kind for kind in KINDS.values() if kind.config is type(config))
    return kind.environment(config)
