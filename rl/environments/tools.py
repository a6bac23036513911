"""A shop's questions that take tools: prices are looked up, totals are calculated, and both are really done.

The model calls a tool in the form of Hermes and Qwen, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, and sees its answer
in the next observation. A turn without a call is the final answer. Prices are the episode's own and stand nowhere in the prompt.
"""

from __future__ import annotations

import random
import re
from typing import Any, Literal

import msgspec
from msgspec import Struct
from pydantic import Field

from rl.environments.answers import extract_answer
from rl.environments.calculator import calculate, spelled
from rl.environments.interface import Action, Chat, ChatMessage, Info, Scored, Split, Step
from rl.environments.settings import EnvironmentConfig
from rl.environments.splits import draw
from rl.trajectory import RewardPart

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_MAX_CALLS_A_TURN = 4
_ITEM_LIST = "apple basket candle drum envelope fork globe hammer inkwell jar kettle ladder mirror needle oar pillow"
_ITEMS = _ITEM_LIST.split()
_SYSTEM = """You answer questions about a shop. You can call tools:
- lookup, arguments {"item": name}: the price of one item
- calculator, arguments {"expression": text}: the value of an arithmetic expression
To call one, write <tool_call>{"name": "lookup", "arguments": {"item": "chair"}}</tool_call> and wait for its answer. \
When you know it, write the result as: The answer is NUMBER"""


class ToolsConfig(EnvironmentConfig):
    kind: Literal["tools"] = "tools"
    num_items: int = Field(default=2, ge=1, le=8)
    """Different items in a question; each is to be looked up."""
    max_turns: int = Field(default=6, ge=1)
    """Of the model, the final answer included."""
    calls_weight: float = Field(default=0.1, ge=0, le=1)
    """What the share of well-formed calls has of the reward; the right answer has the rest."""


class Call(Struct, frozen=True):
    name: str
    arguments: dict[str, Any]


class Order(Struct, frozen=True):
    question: str
    prices: dict[str, int]
    """Of every item of the shop."""
    total: int


class Tools:
    def __init__(self, config: ToolsConfig) -> None:
        self._config = config

    async def reset(self, seed: int, split: Split) -> ToolsEpisode:
        order = draw(seed, split, lambda own_seed: order_of(own_seed, self._config.num_items), lambda made: made.question)
        return ToolsEpisode(self._config, order)

    async def close(self) -> None:
        """There is nothing to give back."""


class ToolsEpisode:
    def __init__(self, config: ToolsConfig, order: Order) -> None:
        self._config = config
        self._order = order
        self._num_turns = 0
        self._num_calls = 0
        self._num_good_calls = 0
        self._looked_up: set[str] = set()
        self._answer = ""
        self._is_truncated = False

    @property
    def first(self) -> Step:
        return Step(Chat((ChatMessage("system", _SYSTEM), ChatMessage("user", self._order.question))))

    async def step(self, action: Action) -> Step:
        self._num_turns += 1
        calls = _CALL.findall(action.text)
        if not calls or action.is_truncated:
            self._answer = "" if calls else extract_answer(action.text)
            self._is_truncated = action.is_truncated
            return Step(None, is_done=True, is_truncated=action.is_truncated)
        if self._num_turns >= self._config.max_turns:
            self._is_truncated = True
            return Step(None, is_done=True, is_truncated=True)
        return Step(Chat(tuple(ChatMessage("tool", self._call(text)) for text in calls[:_MAX_CALLS_A_TURN])))

    async def score(self) -> Scored:
        is_right = self._answer == str(self._order.total)
        parts = [RewardPart("correct", float(is_right), 1.0 - self._config.calls_weight)]
        share = self._num_good_calls / self._num_calls if self._num_calls else 0.0
        parts.append(RewardPart("calls", share, self._config.calls_weight))
        info: Info = {
            "answer": self._answer,
            "expected": str(self._order.total),
            "num_turns": self._num_turns,
            "num_calls": self._num_calls,
            "num_looked_up": len(self._looked_up),
        }
        return Scored(tuple(parts), self._is_truncated, info, reference=str(self._order.total))

    async def close(self) -> None:
        """There is nothing to give back."""

    def _call(self, text: str) -> str:
        """The tool's answer; what is wrong with a call is an answer as well."""
        self._num_calls += 1
        try:
            call = msgspec.json.decode(text.strip(), type=Call)
            said = self._use(call)
        except (msgspec.DecodeError, RecursionError) as error:
            return f'error: a call is {{"name": ..., "arguments": {{...}}}} in JSON: {error}'
        except ValueError as error:
            return f"error: {error}"
        self._num_good_calls += 1
        return said

    def _use(self, call: Call) -> str:
        match call:
            case Call("lookup", {"item": str() as item}):
                if item not in self._order.prices:
                    raise ValueError(f"the shop has no {item!r}")
                self._looked_up.add(item)
                return str(self._order.prices[item])
            case Call("calculator", {"expression": str() as expression}):
                return spelled(calculate(expression))
        raise ValueError(
            "there are lookup, with the argument item, and calculator, with the argument expression; both are texts"
        )


def order_of(own_seed: int, num_items: int) -> Order:
    """A question, the shop's prices, and the total that answers it."""
    rng = random.Random(own_seed)
    prices = {item: rng.randrange(2, 100) for item in _ITEMS}
    wanted = {item: rng.randrange(2, 10) for item in rng.sample(_ITEMS, num_items)}
    listed = " and ".join(f"{count} of {item}" for item, count in wanted.items())
    total = sum(prices[item] * count for item, count in wanted.items())
    return Order(f"What is the total price of {listed}?", prices, total)
