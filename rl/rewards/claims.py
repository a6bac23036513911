"""What the reward model sees of an answer: hashed n-grams of its end, with the reference in it marked.

The reference's own words give way to one mark and all other numbers to another, so that "the answer is 42" is the same text as
"the answer is 7" where these are the references: what is learned is how right answers look, not which ones were right.
"""

from __future__ import annotations

import re
from zlib import crc32

import numpy as np
import numpy.typing as npt
from msgspec import Struct

NUM_FEATURES = 1 << 14
_TAIL_WORDS = 24
"""The verdict is at an answer's end; what lies before it is reasoning."""
_WORD = re.compile(r"-?\d+(?:[.,/]\d+)*|[^\W\d_]+|[^\w\s]")
_REFERENCE, _NUMBER = "<ref>", "<num>"

Features = npt.NDArray[np.int64]


class Claim(Struct, frozen=True):
    """A completion that answers a question whose answer is known."""

    reference: str
    """The right answer."""
    completion: str


class Pair(Struct, frozen=True):
    """A right answer and what became of it when its answer was changed."""

    right: Claim
    wrong: Claim


def words_of(text: str) -> list[str]:
    """Numbers, words and signs, in lower case."""
    return _WORD.findall(text.lower())


def last_words(text: str, count: int) -> list[str]:
    """The last so many of its words, one or more; fewer where it has no more. What lies before them is not looked at."""
    size = 16 * count
    while size < len(text):
        words = words_of(text[-size:])[2:]  # a number that is cut makes two others
        if len(words) >= count:
            return words[-count:]
        size *= 4
    return words_of(text)[-count:]


def marked(claim: Claim, last: int) -> list[str]:
    """The completion's words, each occurrence of the reference one mark, each other number another: the last so many marks."""
    reference = words_of(claim.reference)
    words = last_words(claim.completion, (last + 1) * max(1, len(reference)))
    found: list[str] = []
    place = 0
    while place < len(words):
        if reference and words[place : place + len(reference)] == reference:
            found.append(_REFERENCE)
            place += len(reference)
        else:
            found.append(_NUMBER if any(letter.isdigit() for letter in words[place]) else words[place])
            place += 1
    return found[-last:]


def features(claim: Claim) -> Features:
    """Indices below NUM_FEATURES of its 1- to 3-grams and of its last value, each once, ascending. Equal on every machine."""
    words = ["<begin>", *marked(claim, _TAIL_WORDS), "<end>"]
    grams = {" ".join(words[start : start + size]) for size in (1, 2, 3) for start in range(len(words) - size + 1)}
    values = [word for word in words if word in (_REFERENCE, _NUMBER)]
    grams.add(f"<last> {values[-1] if values else None}")  # as no words of a completion are
    return np.unique(np.asarray([crc32(gram.encode()) % NUM_FEATURES for gram in sorted(grams)], np.int64))
