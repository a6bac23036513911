"""What every load tester is told to do."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.sources import human_eval
from loadtest.traffic import Prompt, is_held_out

_NUM_PROBLEMS = 10
_QUESTIONS = (
    "What is the name of this function? Answer with the name only.",
    "What does this function do? Answer in one short sentence.",
    "Which types do its arguments have? Answer in a few words.",
    "Complete this function.",
)
"""Answers of many lengths: were all equally long, requests would begin and end in step, and a difference of a millisecond
between two load testers would decide how the engine batches them."""

TEMPERATURE = 0.0
OPTIONS: dict[str, Any] = {"skip_special_tokens": False, "include_stop_str_in_output": True}
"""More fields of the request's body, of vLLM: the token that ends an answer is shown. Else it comes as an event without text,
which one load tester takes for the last chunk and another does not."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests to one server, so many at a time."""

    url: str
    """Without `/v1`."""
    model: str
    tokenizer_dir: Path
    """Of the model: the others count prompts with it before they begin."""
    prompts: tuple[str, ...]
    concurrency: int
    max_tokens: int
    cores: Collection[int] = ()
    """Where the load testers run; empty: where this process does."""

    @property
    def body(self) -> dict[str, Any]:
        """The fields of a request's body that decide its answer."""
        return {"max_tokens": self.max_tokens, "temperature": TEMPERATURE, **OPTIONS}

    def texts(self, number: int) -> list[str]:
        """The prompts of that many requests, round and round."""
        return list(itertools.islice(itertools.cycle(self.prompts), number))


def questions() -> tuple[str, ...]:
    """Questions about code, all from the part of the traffic that `bench run` sends by default."""
    return shown_to_all(
        f"Here is a Python function.\n\n{_code(problem)}\n\n{question}"
        for problem in human_eval.load().train[:_NUM_PROBLEMS]
        for question in _QUESTIONS
    )


def _code(problem: Prompt) -> str:
    """The function, without what is asked about it there."""
    return problem.messages[0]["content"].partition("\n\n")[2]


def shown_to_all(texts: Iterable[str]) -> tuple[str, ...]:
    """Those that `bench run` does not hold out, so that all load testers send the same."""
    return tuple(text for text in texts if not is_held_out(text))
