"""Mathematical questions whose answers are compared as mathematics: 1/2 is 0.5."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct
from pydantic import Field

from rl.environments.answers import extract_answer
from rl.environments.collection import read_lines
from rl.environments.interface import Action, EnvironmentFailed, Info, Observation, Split
from rl.environments.math_verifier import MathVerifier
from rl.environments.settings import EnvironmentConfig
from rl.environments.single_turn import SingleTurn, ask
from rl.environments.splits import Divided
from rl.trajectory import RewardPart
from wire.errors import ConfigError


class MathConfig(EnvironmentConfig):
    kind: Literal["math"] = "math"
    path: Path
    """JSON lines `{"question": ..., "answer": ...}`, the answer in LaTeX or plain; `.gz` is read as such."""
    instruction: str = "Reason step by step, and put your final answer within \\boxed{}."
    """Follows every question."""
    num_processes: int = Field(default=1, ge=1)
    """That compare answers, for each environment worker."""
    deadline_s: float = Field(default=5.0, gt=0)
    """Of one comparison; an answer that takes longer is wrong."""


class MathProblem(Struct, frozen=True):
    question: str
    answer: str


class Math(SingleTurn[MathProblem]):
    def __init__(self, config: MathConfig) -> None:
        """Raises ConfigError where math-verify or the file is not there."""
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError("the package math-verify is not installed; run: pip install 'paceline[rl]'")
        self._problems = Divided(read_lines(config.path, MathProblem), lambda problem: problem.question)
        self._instruction = config.instruction
        self._verifier = MathVerifier(num_processes=config.num_processes, deadline_s=config.deadline_s)

    def problem(self, seed: int, split: Split) -> MathProblem:
        return self._problems.pick(seed, split)

    def question(self, problem: MathProblem) -> Observation:
        return ask(f"{problem.question}\n\n{self._instruction}")

    async def judge(self, problem: MathProblem, action: Action) -> tuple[Sequence[RewardPart], Info]:
        said = extract_answer(action.text)
        verdict = await self._verifier.compare(problem.answer, said) if said else "wrong"
        if verdict == "unreadable":
            raise EnvironmentFailed(
                f"math-verify cannot read the expected answer {problem.answer!r} of {problem.question[:80]!r}"
            )
        return [RewardPart("correct", float(verdict == "right"))], {"answer": said, "verdict": verdict}

    def reference(self, problem: MathProblem) -> str | None:
        return problem.answer

    async def close(self) -> None:
        await self._verifier.close()
