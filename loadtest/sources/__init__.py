"""Sources of prompts, by name."""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.traffic import Prompt, TrafficError, human_eval


def open_source(name: str, split: str) -> Sequence[Prompt]:
    """The prompts of a source's split (`train` or `heldout`), at least one; raises TrafficError."""
    if name != "human_eval":
        raise TrafficError(f"no source is called {name!r}; there is human_eval")
    source = human_eval()
    return source.heldout if split == "heldout" else source.train
