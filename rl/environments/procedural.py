"""Small tasks that a model of 135 million parameters gets right now and then, so that there is something to learn from.

Each is a class of its own configuration and environment. Words that are asked for never appear among a prompt's examples.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct
from pydantic import Field

from rl.environments.interface import Action, Info, Observation, Split, Text
from rl.environments.settings import EnvironmentConfig
from rl.environments.single_turn import SingleTurn, ask
from rl.environments.splits import draw
from rl.trajectory import RewardPart

_NUMBER = re.compile(r"(?<![\w.])(-?)(\d+)(?!\w|\.\d)")


class Asked(Struct, frozen=True):
    """A question and its right answer."""

    question: str
    answer: str


class AdditionConfig(EnvironmentConfig):
    kind: Literal["addition"] = "addition"
    style: Literal["chat", "few_shot"] = "chat"
    """`few_shot` is plain text with three examples."""


class MaximumConfig(EnvironmentConfig):
    kind: Literal["maximum"] = "maximum"
    style: Literal["chat", "few_shot"] = "chat"


class UpperCaseConfig(EnvironmentConfig):
    kind: Literal["upper_case"] = "upper_case"


class BrevityConfig(EnvironmentConfig):
    kind: Literal["brevity"] = "brevity"
    max_words: int = Field(default=5, ge=1)
    """An answer of so many words or fewer has the whole reward; it falls to 0 at four times as many."""


class NumberTask(SingleTurn[Asked]):
    """Questions whose answer is one number."""

    def __init__(self, config: AdditionConfig | MaximumConfig) -> None:
        self._style = config.style

    def make(self, rng: random.Random) -> tuple[str, str, str]:
        """A question for a chat, the same as a line to be completed, and the answer."""
        raise NotImplementedError

    def problem(self, seed: int, split: Split) -> Asked:
        def asked(own_seed: int) -> tuple[Asked, random.Random]:
            rng = random.Random(own_seed)
            chat, line, answer = self.make(rng)
            return Asked(chat if self._style == "chat" else line, answer), rng

        found, rng = draw(seed, split, asked, lambda drawn: drawn[0].question)
        if self._style == "chat":
            return found
        examples: list[Asked] = []
        while len(examples) < 3:
            example, _ = draw(rng.getrandbits(29), "train", asked, lambda drawn: drawn[0].question)
            if example != found and example not in examples:
                examples.append(example)
        lines = [f"{example.question} {example.answer}" for example in examples]
        return Asked("\n".join([*lines, found.question]), found.answer)

    def question(self, problem: Asked) -> Observation:
        return ask(problem.question) if self._style == "chat" else Text(problem.question)

    async def judge(self, problem: Asked, action: Action) -> tuple[Sequence[RewardPart], Info]:
        said = action.text if self._style == "chat" else _first_line(action.text)
        answer = last_number(said)
        return [RewardPart("correct", float(answer == problem.answer))], {"answer": answer, "expected": problem.answer}

    def reference(self, problem: Asked) -> str | None:
        return problem.answer if self._style == "chat" else None


class Addition(NumberTask):
    """The sum of two digits. There are a hundred of them, a fifth of which is held out."""

    def make(self, rng: random.Random) -> tuple[str, str, str]:
        a, b = rng.randrange(10), rng.randrange(10)
        return f"What is {a} + {b}? Answer with the number only.", f"{a} + {b} =", str(a + b)


class Maximum(NumberTask):
    """The largest of three different numbers below a hundred."""

    def make(self, rng: random.Random) -> tuple[str, str, str]:
        numbers = rng.sample(range(100), 3)
        listed = ", ".join(map(str, numbers))
        return (
            f"Which of these numbers is the largest: {listed}? Answer with the number only.",
            f"The largest of {listed} is",
            str(max(numbers)),
        )


class UpperCase(SingleTurn[Asked]):
    """A word in capitals, after three examples in plain text."""

    def __init__(self, config: UpperCaseConfig) -> None:
        """There is nothing to configure."""

    def problem(self, seed: int, split: Split) -> Asked:
        def asked(own_seed: int) -> tuple[str, random.Random]:
            rng = random.Random(own_seed)
            return rng.choice(_WORDS), rng

        word, rng = draw(seed, split, asked, lambda drawn: drawn[0])
        lines = [f"{example} -> {example.upper()}" for example in rng.sample(_EXAMPLES, 3)]
        return Asked("\n".join([*lines, f"{word} ->"]), word.upper())

    def question(self, problem: Asked) -> Observation:
        return Text(problem.question)

    async def judge(self, problem: Asked, action: Action) -> tuple[Sequence[RewardPart], Info]:
        answer = _first_line(action.text)
        return [RewardPart("correct", float(answer == problem.answer))], {"answer": answer, "expected": problem.answer}


class Brevity(SingleTurn[str]):
    """Answer in at most N words and end by yourself. The reward is shaped: fewer words too many, more of it."""

    def __init__(self, config: BrevityConfig) -> None:
        self._max_words = config.max_words

    def problem(self, seed: int, split: Split) -> str:
        def asked(own_seed: int) -> str:
            rng = random.Random(own_seed)
            return f"{rng.choice(_ASKS)} {rng.choice(_TOPICS)}"

        return draw(seed, split, asked, str)

    def question(self, problem: str) -> Observation:
        return ask(f"{problem}? Answer in at most {self._max_words} words.")

    async def judge(self, problem: str, action: Action) -> tuple[Sequence[RewardPart], Info]:
        num_words = len(re.findall(r"[^\W_]+(?:['’-][^\W_]+)*", action.text))
        parts = [
            RewardPart("brevity", brevity(num_words, self._max_words), 0.5),
            RewardPart("ended", float(num_words > 0 and not action.is_truncated), 0.5),
        ]
        return parts, {"num_words": num_words}


def brevity(num_words: int, max_words: int) -> float:
    """1 from one word to `max_words`, then linearly to 0 at four times that; nothing said is worth nothing."""
    if num_words == 0:
        return 0.0
    return min(1.0, max(0.0, (4 * max_words - num_words) / (3 * max_words)))


def last_number(text: str) -> str:
    """The last whole number of a text; empty where it has none.

    A text with several different ones commits itself to none, unless it says an equation: what follows its last `=` counts.
    """
    committed = text.rpartition("=")[2]
    numbers = {sign + (digits.lstrip("0") or "0") for sign, digits in _NUMBER.findall(committed)}
    return numbers.pop() if len(numbers) == 1 else ""


def _first_line(text: str) -> str:
    """A text that goes on from examples begins further ones; the answer is its first line."""
    stripped = text.strip()
    return stripped.splitlines()[0].strip() if stripped else ""


_EXAMPLES = ("sun", "tea", "box", "hat", "pen", "cup", "map", "key", "bed", "car")
_WORD_LIST = """
dog cat fish bird tree rain snow wind fire rock sand lake hill road ship boat train plane house door wall roof lamp desk chair
book page ink word song drum bell ring coin gold iron wood silk wool rope milk bread salt corn rice bean leaf root seed rose lily
bee ant fox wolf bear deer goat lamb duck swan crow hawk moon star cloud storm night day week month year king queen farm town
park pool gate bridge tower clock shoe coat sock glove belt bag
"""
_WORDS = _WORD_LIST.split()
_ASKS = (
    "What is",
    "Where do you find",
    "What do people do with",
    "What colour is",
    "How would you describe",
    "Why do people like",
)
_TOPIC_LIST = """
water,a tree,the sun,a dog,bread,music,a school,the sea,a river,winter,a garden,coffee,a train,a mountain,the moon,a book,
rain,an apple,a bridge,a clock,honey,a market,the wind,a farm,snow,a friend,a horse,paper,glass,a holiday
"""
_TOPICS = [topic.strip() for topic in _TOPIC_LIST.split(",")]
