"""Held-out problems: those whose text says so. No seed, of any range, can bring one into training.

Seeds alone do not keep the two apart: there are a hundred one-digit additions, and every range of seeds meets all of them. So the
splits draw from seed ranges of their own, and a problem besides belongs to one split by a digest of its text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from rl.environments.interface import EnvironmentFailed, Split

HELDOUT_FRACTION = 0.2
_HELDOUT_SEEDS_BEGIN = 1 << 30
_MAX_DRAWS = 64
"""0.2 of the problems are held out: 64 draws miss them all once in 1.6 million seeds."""

T = TypeVar("T")


def split_of(text: str) -> Split:
    """Which split a problem with this text belongs to, for good."""
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    return "heldout" if digest < HELDOUT_FRACTION * 2**64 else "train"


def seed_in_split(seed: int, split: Split) -> int:
    """The seed in its split's own range; raises EnvironmentFailed where it is none of the range."""
    if seed >= _HELDOUT_SEEDS_BEGIN:
        raise EnvironmentFailed(f"seed {seed} is not below {_HELDOUT_SEEDS_BEGIN}")
    return seed + (_HELDOUT_SEEDS_BEGIN if split == "heldout" else 0)


def draw(seed: int, split: Split, make: Callable[[int], T], text_of: Callable[[T], str]) -> T:
    """The problem of a seed: the first of its draws that belongs to the split; `make` gets a seed of its own for each.

    Raises EnvironmentFailed where none does: the environment has no problems of that split, or hardly any.
    """
    first = seed_in_split(seed, split) * _MAX_DRAWS
    for own_seed in range(first, first + _MAX_DRAWS):
        problem = make(own_seed)
        if split_of(text_of(problem)) == split:
            return problem
    raise EnvironmentFailed(f"none of {_MAX_DRAWS} problems drawn from seed {seed} belongs to the split {split!r}")


class Divided(Generic[T]):
    """A fixed collection, whose problems are asked for their split once, when it is made, and not at every pick."""

    def __init__(self, problems: Sequence[T], text_of: Callable[[T], str]) -> None:
        self._parts: dict[Split, list[T]] = {"train": [], "heldout": []}
        for problem in problems:
            self._parts[split_of(text_of(problem))].append(problem)

    def pick(self, seed: int, split: Split) -> T:
        """The problem of a seed: its split's problems in their order, again and again.

        Raises EnvironmentFailed where there is none in that split.
        """
        part = self._parts[split]
        if not part:
            num_problems = sum(len(problems) for problems in self._parts.values())
            raise EnvironmentFailed(f"none of {num_problems} problems belongs to the split {split!r}")
        return part[seed % len(part)]
