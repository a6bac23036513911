"""Conversations of several turns, in which the assistant's real answers become part of the next prompt."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import aiohttp

from loadtest.client import StreamResult, new_session, stream_chat
from loadtest.processes import SystemUnderTestError
from loadtest.traffic import Prompt

FOLLOW_UPS = (
    "Explain line by line why this is correct.",
    "Which inputs are the hardest for it? Give three of them with the results.",
    "Write a second version that a beginner finds easier to read.",
    "What is the cost in time and memory of both versions?",
    "Write tests for the version you prefer.",
    "Summarise this conversation in three sentences.",
    "Add a docstring in the style of the standard library.",
)
_SYSTEM = (
    "You are the programming assistant of the {name} team. Work by the team's rules. Answer in English, plainly and to the "
    "point. Show whole functions, never fragments, and put code into one fenced block. Use only the standard library unless "
    "asked otherwise. Name things after what they are, in lower case with underscores; constants in upper case. Write type "
    "hints for every argument and result. Prefer small functions without side effects, and raise ValueError with a message "
    "that names the offending value where an argument makes no sense. Do not catch exceptions you cannot handle. Keep lines "
    "under one hundred characters. Say so when a question cannot be answered from what you were told, and ask for what is "
    "missing. When you change code you wrote before, say what changed and why. Give the complexity of an algorithm whenever "
    "it is worse than linear. Never invent functions, modules or results. Tests use plain assert statements and cover empty "
    "input, one element, many elements, and the largest sensible input."
)


@dataclass
class Conversation:
    """One conversation: what the user will say, and what was said so far."""

    id: str
    system: str
    user_turns: Sequence[str]
    results: list[StreamResult] = field(default_factory=list)

    def next_prompt(self) -> Prompt:
        """System prompt, all earlier turns with their answers, and the next question."""
        messages = [{"role": "system", "content": self.system}]
        for question, result in zip(self.user_turns, self.results, strict=False):
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": result.text}]
        turn = len(self.results)
        messages.append({"role": "user", "content": self.user_turns[turn]})
        return Prompt(f"{self.id}/{turn}", tuple(messages))


def conversations(problems: Sequence[Prompt], *, name: str, number: int, num_turns: int) -> list[Conversation]:
    """That many conversations with one system prompt, each about its own problem; another `name` shares no prefix with them."""
    system = _SYSTEM.format(name=name)
    return [
        Conversation(f"{name}/{index}", system, (problem.messages[-1]["content"], *FOLLOW_UPS[: num_turns - 1]))
        for index, problem in enumerate(problems[:number])
    ]


async def hold(
    url: str,
    model: str,
    talks: Sequence[Conversation],
    *,
    options: Mapping[str, Any],
    mean_pause_s: float,
    seed: int,
) -> list[StreamResult]:
    """Hold all conversations at once, each to its end; raises SystemUnderTestError where a request fails.

    The user's pauses before each turn are drawn from a seeded exponential distribution: without them equal conversations
    would stay in step, and taking engines in turn would happen to be the same as remembering.
    """
    async with new_session(len(talks)) as session:
        draws = [random.Random(f"{seed}/{index}") for index in range(len(talks))]
        await asyncio.gather(
            *(
                _hold_one(session, url, model, talk, options=options, pause=partial(draw.expovariate, 1 / mean_pause_s))
                for talk, draw in zip(talks, draws, strict=True)
            )
        )
    return [result for talk in talks for result in talk.results]


async def _hold_one(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    talk: Conversation,
    *,
    options: Mapping[str, Any],
    pause: Callable[[], float],
) -> None:
    for _ in talk.user_turns:
        await asyncio.sleep(pause())
        result = await stream_chat(session, url, model, talk.next_prompt(), options=options)
        if not result.is_ok:
            raise SystemUnderTestError(f"turn {result.prompt_id} failed: {result.error or 'the answer is not whole'}")
        talk.results.append(result)
