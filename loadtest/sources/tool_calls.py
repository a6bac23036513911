"""Calls of tools: a request in plain words and a few functions, one of which answers it, as JSON. Made here, always the same.

Answers are as unlike prose and code as traffic gets that a small model can still produce.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass

from loadtest.traffic import Prompt, Source, by_id, split

NUM_PROMPTS = 400
_NUM_TOOLS = 3
"""Offered with a request."""
_SEED = 0
_RULES = (
    "You have the functions below. Answer with one JSON object per call, each with the keys name and arguments, first the call "
    "that was asked for, then the same call for two likely alternatives. Write JSON and nothing else.\n"
)


@dataclass(frozen=True)
class _Tool:
    """A function, what users say when they want it, and what fills the gaps."""

    name: str
    does: str
    arguments: dict[str, str]
    request: str
    values: dict[str, tuple[str, ...]]

    def schema(self) -> dict[str, object]:
        properties = {name: {"type": kind} for name, kind in self.arguments.items()}
        return {"name": self.name, "description": self.does, "parameters": {"type": "object", "properties": properties}}


_CITIES = ("Lisbon", "Oslo", "Nairobi", "Osaka", "Quito", "Toronto", "Leipzig", "Hanoi", "Perth", "Tunis")
_DAYS = ("today", "tomorrow", "on Monday", "on Friday", "next weekend")
_NAMES = ("Ada", "Bruno", "Chidi", "Dana", "Emil", "Farah", "Goro", "Hana")
_TOOLS = (
    _Tool(
        "get_weather", "Forecast for a city on a day.", {"city": "string", "day": "string", "unit": "string"},
        "What will the weather be like in {city} {day}, in {unit}?",
        {"city": _CITIES, "day": _DAYS, "unit": ("celsius", "fahrenheit")},
    ),
    _Tool(
        "book_train", "Book seats on a train.", {"origin": "string", "destination": "string", "day": "string", "seats": "integer"},
        "Book {seats} seats on a train from {origin} to {destination} {day}.",
        {"origin": _CITIES, "destination": _CITIES, "day": _DAYS, "seats": ("2", "3", "4", "5")},
    ),
    _Tool(
        "send_message", "Send a text message.", {"recipient": "string", "text": "string"},
        "Tell {recipient} that {text}.",
        {"recipient": _NAMES, "text": ("I am late", "the parcel came", "dinner is at eight", "the meeting moved to noon")},
    ),
    _Tool(
        "create_event", "Put an event into the calendar.", {"title": "string", "day": "string", "start": "string", "minutes": "integer"},
        "Put {title} into my calendar {day} at {start} for {minutes} minutes.",
        {"title": ("a review", "the dentist", "a call with the bank", "yoga"), "day": _DAYS,
         "start": ("08:30", "11:00", "14:15", "17:45"), "minutes": ("15", "30", "45", "90")},
    ),
    _Tool(
        "convert_currency", "Convert an amount of money.", {"amount": "number", "source": "string", "target": "string"},
        "How much is {amount} {source} in {target}?",
        {"amount": ("12.50", "80", "199", "2500"), "source": ("EUR", "USD", "JPY"), "target": ("GBP", "CHF", "SEK", "INR")},
    ),
    _Tool(
        "search_products", "Search a shop.", {"query": "string", "max_price": "number", "sort_by": "string"},
        "Find {query} below {max_price} dollars and sort them by {sort_by}.",
        {"query": ("a desk lamp", "hiking boots", "a rice cooker", "noise-cancelling headphones", "a bicycle pump"),
         "max_price": ("20", "50", "120"), "sort_by": ("price", "rating", "newest")},
    ),
    _Tool(
        "set_thermostat", "Set the temperature of a room.", {"room": "string", "degrees": "number", "until": "string"},
        "Keep the {room} at {degrees} degrees until {until}.",
        {"room": ("kitchen", "bedroom", "office", "bathroom"), "degrees": ("18", "19.5", "21", "22.5"),
         "until": ("06:00", "18:00", "22:30", "midnight")},
    ),
    _Tool(
        "query_database", "Count rows of a table.", {"table": "string", "column": "string", "equals": "string", "limit": "integer"},
        "Count the rows of {table} whose {column} is {equals}, {limit} at most.",
        {"table": ("orders", "users", "invoices", "tickets"), "column": ("status", "country", "team"),
         "equals": ("open", "closed", "pending", "unknown"), "limit": ("10", "100", "1000")},
    ),
)  # fmt: skip


def load() -> Source:
    """The requests; nothing can be absent or broken."""
    return split(_prompts(), about=by_id)


def _prompts() -> Iterator[Prompt]:
    draw = random.Random(_SEED)
    asked: set[str] = set()
    while len(asked) < NUM_PROMPTS:
        tool = draw.choice(_TOOLS)
        question = tool.request.format(**{name: draw.choice(values) for name, values in tool.values.items()})
        offered = [tool, *draw.sample([other for other in _TOOLS if other is not tool], _NUM_TOOLS - 1)]
        draw.shuffle(offered)
        if question not in asked:
            system = _RULES + "\n".join(json.dumps(one.schema()) for one in offered)
            yield Prompt(
                f"tool_calls/{len(asked)}", ({"role": "system", "content": system}, {"role": "user", "content": question})
            )
            asked.add(question)
