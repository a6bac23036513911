"""A question that takes tools, with their answers really looked up and calculated."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from rl.environments.calculator import calculate, spelled
from rl.environments.interface import Action, Chat, Scored, Step
from rl.environments.tools import Tools, ToolsConfig


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def played(*turns: Any, **config: Any) -> tuple[list[Step], Scored]:
    """Turns are texts, or functions of the last step."""

    async def play() -> tuple[list[Step], Scored]:
        episode = await Tools(ToolsConfig(name="shop", **config)).reset(5, "train")
        steps = [episode.first]
        for turn in turns:
            steps.append(await episode.step(Action(turn(steps) if callable(turn) else turn)))
        return steps, await episode.score()

    return asyncio.run(play())


def said(step: Step) -> list[str]:
    assert isinstance(step.observation, Chat)
    return [message.content for message in step.observation.messages if message.role == "tool"]


def wanted(steps: list[Step]) -> list[tuple[int, str]]:
    assert isinstance(steps[0].observation, Chat)
    question = steps[0].observation.messages[-1].content
    return [(int(count), item) for count, item in re.findall(r"(\d+) of (\w+)", question)]


def look_up_all(steps: list[Step]) -> str:
    return "".join(call("lookup", item=item) for _, item in wanted(steps))


def calculate_total(steps: list[Step]) -> str:
    terms = [f"{count} * {price}" for (count, _), price in zip(wanted(steps), said(steps[-1]), strict=True)]
    return call("calculator", expression=" + ".join(terms))


def test_the_tools_lead_to_the_answer_over_several_turns() -> None:
    steps, scored = played(look_up_all, calculate_total, lambda steps: f"The answer is {said(steps[-1])[0]}.")
    assert [step.is_done for step in steps] == [False, False, False, True]
    assert scored.reward == 1.0
    assert scored.info["num_calls"] == 3
    assert scored.info["num_turns"] == 3


def test_prices_stand_nowhere_in_the_prompt() -> None:
    steps, scored = played(look_up_all, "The answer is 1")
    assert isinstance(steps[0].observation, Chat)
    prompt = " ".join(message.content for message in steps[0].observation.messages)
    assert not set(said(steps[1])) & set(re.findall(r"\d+", prompt)) - {str(count) for count, _ in wanted(steps)}
    assert scored.parts[0].value == 0.0


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("<tool_call>not json</tool_call>", "JSON"),
        ("<tool_call>" + "[" * 100_000, "JSON"),
        (call("lookup", item="unicorn"), "no 'unicorn'"),
        (call("calculator", expression="2 ** 9999"), "only"),
        (call("calculator", expression="1 / 0"), "zero"),
        (call("calculator", expression=3), "texts"),
        (call("shell", command="ls"), "there are lookup"),
    ],
)
def test_a_bad_call_is_answered_and_the_episode_goes_on(text: str, error: str) -> None:
    steps, scored = played(text, "The answer is 1")
    (answer,) = said(steps[1])
    assert answer.startswith("error:")
    assert error in answer
    assert [part.value for part in scored.parts] == [0.0, 0.0]


def test_who_only_calls_is_cut_off() -> None:
    steps, scored = played(look_up_all, look_up_all, look_up_all, max_turns=3)
    assert (steps[-1].is_done, steps[-1].is_truncated, scored.is_truncated) == (True, True, True)
    assert scored.parts[0].value == 0.0


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", "14"),
        ("(1 + 2) / 4", "0.75"),
        ("-7 // 2", "-4"),
        ("7 % 3", "1"),
        ("0.1 + 0.2", "0.3"),
        ("1 / 3", "0.333333"),
    ],
)
def test_the_calculator_is_exact(expression: str, value: str) -> None:
    assert spelled(calculate(expression)) == value


@pytest.mark.parametrize(
    "expression",
    ["__import__('os')", "a", "1 if 1 else 2", "'x' * 9", "9**9", "1e400", "(" * 150, "9" * 200, "", "1 +", "True"],
)
def test_the_calculator_refuses_what_is_no_arithmetic_or_too_large(expression: str) -> None:
    with pytest.raises(ValueError, match=r"arithmetic|numbers|characters|beyond|infinity|Invalid"):
        calculate(expression)
