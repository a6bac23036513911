"""Tasksets of the library `verifiers` (v1, 0.4): tasks of one text turn, scored by the taskset's own rewards without a runtime.

The library is optional and heavy, and tied to versions of its dependencies; it is imported when an environment of this kind is
built. Tasks that need a container, tools or a simulated user are played by the library's own harnesses and not by this adapter.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from rl.environments.interface import Action, Chat, ChatMessage, EnvironmentFailed, Info, Observation, Split
from rl.environments.settings import EnvironmentConfig
from rl.environments.single_turn import SingleTurn
from rl.environments.splits import Divided
from rl.trajectory import RewardPart
from wire.errors import ConfigError


class VerifiersConfig(EnvironmentConfig):
    kind: Literal["verifiers"] = "verifiers"
    taskset: str
    """The id of an installed taskset."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Fields of the taskset's own configuration, which checks them."""
    num_tasks: int = Field(default=1000, ge=1)
    """Of its first tasks; a taskset may have no end."""


class Verifiers(SingleTurn[Any]):
    """A problem is a `verifiers.v1.Task`."""

    def __init__(self, config: VerifiersConfig) -> None:
        """Raises ConfigError where the library or the taskset is not there, or a task is none of this adapter's."""
        if importlib.util.find_spec("verifiers") is None:
            raise ConfigError(
                "the package verifiers is not installed; run, in an environment of its own: pip install verifiers==0.4.0"
            )
        from verifiers.v1.configs.taskset import TasksetConfig
        from verifiers.v1.utils.generic import concrete_type
        from verifiers.v1.utils.loaders import load_taskset, taskset_class

        try:
            config_type = concrete_type(taskset_class(config.taskset), TasksetConfig) or TasksetConfig
            taskset = load_taskset(config_type(id=config.taskset, **config.parameters))
            tasks = list(itertools.islice(taskset, config.num_tasks))
        except (ImportError, TypeError, AttributeError, ValueError) as error:
            raise ConfigError(f"environment {config.name!r}: cannot load the taskset {config.taskset!r}: {error}") from error
        if any(task.NEEDS_CONTAINER or task.data.prompt is None for task in tasks):
            raise ConfigError(
                f"environment {config.name!r}: {config.taskset!r} has tasks that need a container or open no conversation"
            )
        self._tasks = Divided(tasks, lambda task: task.data.prompt_text)

    def problem(self, seed: int, split: Split) -> Any:
        return self._tasks.pick(seed, split)

    def question(self, problem: Any) -> Observation:
        return Chat(tuple(ChatMessage(role, content) for role, content in _messages(problem)))

    async def judge(self, problem: Any, action: Action) -> tuple[Sequence[RewardPart], Info]:
        trace = trace_of(problem, action.text)
        await problem.score(trace)
        parts = [
            RewardPart(name, float(reward.score), float(reward.weight))
            for name, reward in trace.rewards.items()
            if reward is not None
        ]
        if not parts:
            raise EnvironmentFailed("none of the taskset's rewards works without a runtime")
        return parts, {name: float(value) for name, value in trace.metrics.items() if value is not None}


def trace_of(task: Any, reply: str) -> Any:
    """The library's record of a conversation, `verifiers.v1.Trace`: the prompt, and one reply that a model sampled."""
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.state import state_cls
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask
    from verifiers.v1.types import AssistantMessage, SystemMessage, UserMessage

    kinds = {"system": SystemMessage, "user": UserMessage, "assistant": AssistantMessage}
    messages = [kinds[role](content=content) for role, content in _messages(task)]
    nodes = [
        MessageNode(parent=index - 1 if index else None, message=message, sampled=index == len(messages))
        for index, message in enumerate([*messages, AssistantMessage(content=reply)])
    ]
    return Trace(
        task=TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        state=state_cls(type(task))(),
        agent=AgentInfo(config=AgentConfig(), name="policy"),
        nodes=nodes,
    )


def _messages(task: Any) -> list[tuple[Literal["system", "user", "assistant"], str]]:
    """Role and text of what the model sees. Raises EnvironmentFailed for what is not text."""
    system = [("system", task.data.system_prompt)] if task.data.system_prompt else []
    prompt = task.data.prompt
    opening = [("user", prompt)] if isinstance(prompt, str) else [(message.role, message.content) for message in prompt]
    for role, content in opening:
        if role not in ("system", "user", "assistant") or not isinstance(content, str):
            raise EnvironmentFailed(
                f"the task {task.key} opens with a {role} message of {type(content).__name__}; only text is played"
            )
    return [*system, *opening]
