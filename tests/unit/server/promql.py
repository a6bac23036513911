"""As much of PromQL as dashboards and alerts use: tokens, balanced brackets, and which names are metrics and which labels."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

TOKEN = re.compile(
    r"""(?P<space>\s+)
    |(?P<string>"(?:[^"\\]|\\.)*")
    |(?P<duration>\d+(?:ms|[smhdwy])(?::\d+(?:ms|[smhdwy]))?)
    |(?P<number>\d+(?:\.\d+)?(?:e[+-]?\d+)?)
    |(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)
    |(?P<operator>=~|!~|!=|==|>=|<=|[-+*/%^<>=,])
    |(?P<open>[({\[])
    |(?P<close>[)}\]])""",
    re.VERBOSE,
)
AGGREGATIONS = {"sum", "min", "max", "avg", "count", "topk", "bottomk", "quantile"}
FUNCTIONS = {"rate", "increase", "changes", "histogram_quantile", "delta", "absent", "clamp_min", "clamp_max", "label_values"}
LABEL_LISTS = {"by", "without", "on", "ignoring", "group_left", "group_right"}
KEYWORDS = {"and", "or", "unless", "offset", "bool"}
PAIRS = {")": "(", "}": "{", "]": "["}


class NotPromQl(ValueError):
    """The text is no expression, as far as this module can tell."""


@dataclass
class Names:
    """What an expression asks for."""

    metrics: set[str] = field(default_factory=set)
    labels: set[str] = field(default_factory=set)


def names(expression: str) -> Names:
    """Raises NotPromQl saying where."""
    tokens = _tokens(expression)
    found = Names()
    opened: list[tuple[str, bool]] = []
    """Brackets that are open, and whether labels are listed in them."""
    for index, (kind, text) in enumerate(tokens):
        following = tokens[index + 1][1] if index + 1 < len(tokens) else ""
        if kind == "open":
            opened.append((text, text == "{" or (index > 0 and tokens[index - 1][1] in LABEL_LISTS)))
        elif kind == "close":
            if not opened or opened.pop()[0] != PAIRS[text]:
                raise NotPromQl(f"{text} closes nothing in {expression!r}")
        elif kind == "name":
            _sort(text, following, bool(opened and opened[-1][1]), found, expression)
    if opened:
        raise NotPromQl(f"{opened[-1][0]} is never closed in {expression!r}")
    return found


def _sort(text: str, following: str, is_label: bool, found: Names, expression: str) -> None:
    if is_label:
        found.labels.add(text)
    elif text in LABEL_LISTS or text in KEYWORDS:
        return
    elif text in FUNCTIONS or text in AGGREGATIONS:
        if following != "(" and following not in LABEL_LISTS:
            raise NotPromQl(f"{text} has no argument in {expression!r}")
    elif following == "(":
        raise NotPromQl(f"no function is called {text} in {expression!r}")
    else:
        found.metrics.add(text)


def _tokens(expression: str) -> list[tuple[str, str]]:
    tokens = []
    position = 0
    while position < len(expression):
        match = TOKEN.match(expression, position)
        if match is None or match.lastgroup is None:
            raise NotPromQl(f"{expression[position : position + 20]!r} is no token of PromQL in {expression!r}")
        if match.lastgroup != "space":
            tokens.append((match.lastgroup, match.group()))
        position = match.end()
    return tokens
