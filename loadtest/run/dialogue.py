"""One conversation of a lane: what the user says next, when, and when they leave."""

from __future__ import annotations

import random

from loadtest.conversations import FOLLOW_UPS
from loadtest.scenario import Lane
from loadtest.traffic import Prompt


class Dialogue:
    """A single request is a dialogue of one turn. What is random in it is drawn from the seed, the lane and the index."""

    def __init__(self, lane: Lane, prompt: Prompt, *, seed: int, index: int) -> None:
        self._lane = lane
        self._draw = random.Random(f"{seed}/{lane.name}/{index}")
        self._prompt = prompt
        self.num_turns = 1 if lane.turns is None else lane.turns.number
        self._messages = list(prompt.messages) if lane.turns is None else _opening(prompt)
        self._later_questions = [] if lane.turns is None else [*_questions(prompt)[1:], *prompt.later_questions]
        self._turn = 0

    def prompt(self) -> Prompt:
        """Everything said so far, the user's turn last."""
        return Prompt(self._prompt.id, tuple(self._messages))

    def answered(self, text: str) -> None:
        """The answer to this turn came; the user goes on."""
        later = self._later_questions
        follow_up = FOLLOW_UPS[(self._turn - len(later)) % len(FOLLOW_UPS)]
        question = later[self._turn] if self._turn < len(later) else follow_up
        self._messages += [{"role": "assistant", "content": text}, {"role": "user", "content": question}]
        self._turn += 1

    def think_time_s(self) -> float:
        """The user's pause before the next turn."""
        mean_s = self._lane.turns.mean_think_time_s if self._lane.turns else 0.0
        return self._draw.expovariate(1 / mean_s) if mean_s else 0.0

    def leaves_after_s(self) -> float | None:
        """When the client of this turn leaves, after sending it; None where it stays."""
        cancel = self._lane.cancel
        if cancel is None or self._draw.random() >= cancel.share:
            return None
        return self._draw.expovariate(1 / cancel.mean_after_s)


def _opening(prompt: Prompt) -> list[dict[str, str]]:
    """Up to the user's first turn."""
    roles = [message["role"] for message in prompt.messages]
    return list(prompt.messages[: roles.index("user") + 1 if "user" in roles else None])


def _questions(prompt: Prompt) -> list[str]:
    return [message["content"] for message in prompt.messages if message["role"] == "user"]
