"""Taking the answer out of what a model said. What is taken out is compared strictly, so padding it with guesses earns nothing."""

from __future__ import annotations

import re

_OPENED, _CLOSED = "<answer>", "</answer>"
_SAID = re.compile(r"\banswer ?(?:is|=|:)[ \t:]*([^\s:][^\n]*)", re.IGNORECASE)
_BOXED = "\\boxed{"


def extract_answer(text: str) -> str:
    """The answer a text commits itself to, empty where it says nothing.

    The last of: `<answer>...</answer>`, a `\\boxed{...}`, what follows "answer is" or "answer:"; in that order of precedence. A
    text with none of them is its own answer if it has a single line, else its last line is.
    """
    tagged = _last_tagged(text)
    if tagged is not None:
        return _plain(tagged)
    boxed = _last_boxed(text)
    if boxed is not None:
        return _plain(boxed)
    said = _SAID.findall(text)
    if said:
        return _plain(said[-1])
    lines = text.strip().splitlines()
    return _plain(lines[-1]) if lines else ""


def _last_tagged(text: str) -> str | None:
    """The contents of the last `<answer>` that is closed; None where there is none."""
    start = text.rfind(_OPENED, 0, max(text.rfind(_CLOSED), 0))
    return text[start + len(_OPENED) : text.find(_CLOSED, start)] if start >= 0 else None


def _last_boxed(text: str) -> str | None:
    """The contents of the last `\\boxed{}`, whose braces may nest; None where there is none or it is not closed."""
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    depth = 1
    for place in range(start + len(_BOXED), len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start + len(_BOXED) : place]
    return None


def _plain(answer: str) -> str:
    """Without what surrounds an answer and is no part of it: spaces, emphasis, one full stop."""
    return answer.strip().strip("*`").strip().removesuffix(".").strip()
