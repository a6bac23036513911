"""reasoning-gym: more than a hundred kinds of problems with a right answer, made from a seed, under a strict scorer.

The package's own scores give credit for text that merely contains the answer or resembles it, so that shorter wrong answers earn
more than longer ones: a policy learns that before it learns to reason. Here an answer is taken out of the text first and then
is right, 1, or not, 0.

Some of its scorers run an answer as Python (`eval`, sympy's `parse_expr`). They get readers instead that run nothing; tasks whose
scorers need more than that are refused.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal

from msgspec import Struct
from pydantic import Field

from rl.environments.answers import extract_answer
from rl.environments.calculator import calculate
from rl.environments.interface import Action, EnvironmentFailed, Info, Observation, Split
from rl.environments.settings import EnvironmentConfig
from rl.environments.single_turn import SingleTurn, ask
from rl.environments.splits import draw
from rl.trajectory import RewardPart
from wire.errors import ConfigError

_PACKAGE = "reasoning_gym"
_CATEGORIES = ("arithmetic", "logic", "algebra", "geometry", "graphs", "induction", "cognition", "probability", "games")
_LATER_CATEGORIES = ("algorithmic", "code", "arc")
"""They need more of other packages."""
_SCORER_ERRORS = (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, SyntaxError, RecursionError)
"""Raised by some scorers over answers they cannot parse: those are wrong answers."""


def _whole(expression: str) -> int:
    """The scorer of puzzle24 cuts off what is behind the point: 24.5 would be 24. Raises ValueError."""
    value: Fraction = calculate(expression)
    if value.denominator != 1:
        raise ValueError(f"{expression!r} is no whole number")
    return int(value)


_HARMLESS_READERS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "binary_matrix": ("eval", ast.literal_eval),
    "countdown": ("parse_expr", calculate),
    "n_queens": ("eval", ast.literal_eval),
    "puzzle24": ("parse_expr", _whole),
    "spiral_matrix": ("eval", ast.literal_eval),
    "string_insertion": ("eval", ast.literal_eval),
}
"""By task: what its scorer reads an answer with, and what takes its place in the scorer's module."""
_REFUSED_TASKS = ("intermediate_integration", "polynomial_multiplication", "simple_integration")
"""Their scorers give the answer to sympy, which runs it as Python."""


class ReasoningGymConfig(EnvironmentConfig):
    kind: Literal["reasoning_gym"] = "reasoning_gym"
    task: str
    """A data set of the package, such as `chain_sum`."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Fields of the data set's own configuration, which checks them."""


class Entry(Struct, frozen=True):
    dataset: Any
    """It scores its own entries."""
    entry: dict[str, Any]


class ReasoningGym(SingleTurn[Entry]):
    def __init__(self, config: ReasoningGymConfig) -> None:
        """Raises ConfigError where the package, what the task needs of others, the task or a parameter is not there."""
        self._config = config
        self._create_dataset = _creator_of(config.task)
        try:
            self._make(0)
        except (ValueError, TypeError, AssertionError) as error:
            raise ConfigError(
                f"environment {config.name!r}: reasoning-gym refuses {config.parameters} for {config.task!r}: {error}"
            ) from error

    def problem(self, seed: int, split: Split) -> Entry:
        return draw(seed, split, self._make, lambda made: str(made.entry["question"]))

    def question(self, problem: Entry) -> Observation:
        return ask(str(problem.entry["question"]))

    async def judge(self, problem: Entry, action: Action) -> tuple[Sequence[RewardPart], Info]:
        answer = extract_answer(action.text)
        try:
            credit = float(problem.dataset.score_answer(answer, problem.entry)) if answer else 0.0
        except _SCORER_ERRORS as error:
            return [RewardPart("correct", 0.0)], {"answer": answer, "scorer_raised": repr(error)}
        return [RewardPart("correct", strict(credit))], {"answer": answer, "library_credit": credit}

    def reference(self, problem: Entry) -> str | None:
        """Of tasks that have several right answers, one."""
        answer = problem.entry.get("answer")
        return answer if isinstance(answer, str) else None

    def _make(self, own_seed: int) -> Entry:
        dataset = self._create_dataset(self._config.task, seed=own_seed, size=1, **self._config.parameters)
        return Entry(dataset, dataset[0])


def strict(credit: float) -> float:
    """Whole credit or none. Raises EnvironmentFailed for what is no credit."""
    if not 0.0 <= credit <= 1.0:
        raise EnvironmentFailed(f"reasoning-gym scored an answer {credit}, which is outside [0, 1]")
    return float(credit == 1.0)


def _disarm(task: str, dataset: type) -> None:
    """Keep its scorer from running answers; raises ConfigError where that takes away what it needs."""
    if task in _REFUSED_TASKS:
        raise ConfigError(
            f"the scorer of {task!r} runs what the model answers as a program, outside any sandbox; choose another task"
        )
    if task in _HARMLESS_READERS:
        name, reader = _HARMLESS_READERS[task]
        setattr(sys.modules[dataset.__module__], name, reader)


def _creator_of(task: str) -> Any:
    """The package's `create_dataset`, once the task is registered with it; raises ConfigError.

    Categories are imported one by one until one brings the task: the package's own `__init__` imports them all, computer algebra,
    plotting and a SAT solver included, and fails where any of those is absent.
    """
    found = importlib.util.find_spec(_PACKAGE)
    if found is None:
        raise ConfigError("the package reasoning-gym is not installed; run: pip install reasoning-gym==0.1.25")
    sys.modules.setdefault(_PACKAGE, importlib.util.module_from_spec(found))
    absent: dict[str, str] = {}
    factory: Any = None
    for category in (*_CATEGORIES, *_LATER_CATEGORIES):
        try:
            importlib.import_module(f"{_PACKAGE}.{category}")
            factory = importlib.import_module(f"{_PACKAGE}.factory")  # after a category: the two import each other
        except ModuleNotFoundError as error:
            absent[category] = error.name or str(error)
        if factory and task in factory.DATASETS:
            _disarm(task, factory.DATASETS[task][0])
            return factory.create_dataset
    lacks = "".join(f"; its {category} tasks need the module {module}" for category, module in absent.items())
    tasks = ", ".join(sorted(factory.DATASETS)) if factory else "none"
    raise ConfigError(f"reasoning-gym has no task {task!r} here{lacks}; there are {tasks}")
