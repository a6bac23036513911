"""The registry of bars: what is promised, in which unit, and which function measures it."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Literal

from loadtest.run.conduct import Provenance

Comparison = Literal["at_least", "at_most", "equals"]


class UnknownBar(ValueError):
    """A name that is neither a part nor a bar."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    name: str
    """`P1.al_heldout`."""
    bar: float
    comparison: Comparison
    unit: str
    what: str
    function: str
    """`module:function` under loadtest.bars; it measures every bar that names it."""

    def is_met(self, value: float | None) -> bool:
        """Whether a measured value reaches the bar; what could not be measured does not."""
        if value is None or value != value:
            return False
        match self.comparison:
            case "at_least":
                return value >= self.bar
            case "at_most":
                return value <= self.bar
            case "equals":
                return value == self.bar


@dataclass(frozen=True)
class Measured:
    """What came out for one bar."""

    value: float | None
    """None where it could not be measured; `detail` says why."""
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Bench:
    """What a measuring function gets."""

    up_arguments: tuple[str, ...]
    """`--config` and `--set` words of the command line, handed on to `paceline up`."""
    provenance: Provenance
    """Of this code, as runs record it."""


def load() -> tuple[Bar, ...]:
    """All bars, in the order of the file."""
    tables = tomllib.loads((resources.files("loadtest.bars") / "bars.toml").read_text())
    return tuple(Bar(name=f"{part}.{name}", **entry) for part, bars in tables.items() for name, entry in bars.items())


def select(bars: Sequence[Bar], only: Sequence[str]) -> list[Bar]:
    """Those named by part or by name, all where nothing is named; raises UnknownBar."""
    if not only:
        return list(bars)
    chosen: list[Bar] = []
    for name in only:
        found = [bar for bar in bars if bar.name == name or bar.name.split(".")[0] == name]
        if not found:
            known = ", ".join(bar.name for bar in bars)
            raise UnknownBar(f"no bar or part is called {name!r}; bars: {known}")
        chosen += [bar for bar in found if bar not in chosen]
    return chosen
