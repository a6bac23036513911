"""Answers compared as mathematics, in processes that are killed when they are late."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from rl.environments.child import Child
from rl.environments.interface import Action, EnvironmentFailed
from rl.environments.math import Math, MathConfig, MathProblem
from rl.environments.math_child import MEMORY_BYTES
from rl.environments.math_verifier import MathVerifier, Verdict

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None,
    reason="the package math-verify is not installed: pip install 'paceline[rl]'",
)


def compared(pairs: Sequence[tuple[str, str]], *, deadline_s: float = 60.0, num_processes: int = 1) -> list[Verdict]:
    async def run() -> list[Verdict]:
        verifier = MathVerifier(num_processes=num_processes, deadline_s=deadline_s)
        try:
            return list(await asyncio.gather(*(verifier.compare(*pair) for pair in pairs)))
        finally:
            await verifier.close()

    return asyncio.run(run())


def test_answers_are_compared_as_mathematics() -> None:
    pairs = [
        (r"\frac{1}{2}", "0.5"),
        ("0.5", r"\frac12"),
        (r"2\sqrt{2}", r"\sqrt{8}"),
        ("12", "$12$"),
        ("x + 1", "1 + x"),
        ("12", "13"),
        ("12", "12 or 13"),
        ("12", "nonsense"),
        ("12", r"}{\frac"),
    ]
    assert compared(pairs) == ["right"] * 5 + ["wrong"] * 4


def test_an_answer_that_computes_without_end_is_out_of_time_and_the_next_one_is_judged() -> None:
    """A tower of powers is one step of the interpreter: no alarm signal interrupts it."""
    verdicts = compared([("12", "9^{9^{9^{9}}}"), ("12", "12")], deadline_s=8.0)
    assert verdicts[1] == "right"
    assert verdicts[0] in ("out_of_time", "wrong")


def test_a_late_process_is_killed_and_replaced() -> None:
    assert compared([("12", "12")] * 2, deadline_s=1e-9) == ["out_of_time"] * 2


def test_a_process_that_dies_between_answers_is_no_verdict() -> None:
    async def run() -> None:
        verifier = MathVerifier(num_processes=1, deadline_s=60.0)
        try:
            assert await verifier.compare("12", "12") == "right"
            child = await verifier._free.get()
            assert isinstance(child, Child)
            assert psutil.Process(child.pid).rlimit(psutil.RLIMIT_AS) == (MEMORY_BYTES, MEMORY_BYTES)
            await child.stop()
            verifier._free.put_nowait(child)
            assert await verifier.compare("12", "12") == "right"
        finally:
            await verifier.close()

    asyncio.run(run())


def test_an_expected_answer_that_cannot_be_read_is_the_environments_fault(tmp_path: Path) -> None:
    problem = MathProblem("What is it?", "")
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps({"question": problem.question, "answer": problem.answer}))

    async def run() -> None:
        environment = Math(MathConfig(name="math", path=path))
        try:
            with pytest.raises(EnvironmentFailed, match="expected answer"):
                await environment.judge(problem, Action("12"))
        finally:
            await environment.close()

    asyncio.run(run())


def test_a_question_is_played_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text("\n".join(json.dumps({"question": f"What is {n} + {n}?", "answer": str(2 * n)}) for n in range(50)))

    async def run() -> None:
        environment = Math(MathConfig(name="math", path=path))
        try:
            episode = await environment.reset(3, "heldout")
            answer = environment.problem(3, "heldout").answer
            await episode.step(Action(f"So we have $2n$.\n\\boxed{{{answer}.0}}"))
            scored = await episode.score()
            assert (scored.reward, scored.info["verdict"]) == (1.0, "right")
        finally:
            await environment.close()

    asyncio.run(run())
