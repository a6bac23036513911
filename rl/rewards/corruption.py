"""Wrong answers made of right ones, by changing what they state: negatives whose style tells nothing.

Cooper (arXiv 2508.05613) has another language model do this; for answers that are numbers or words a program can, and the rule
checks that what it made is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from rl.rewards.claims import Claim

_NUM_TRIES = 8


def corrupt(claim: Claim, is_right: Callable[[str], bool], generator: np.random.Generator) -> Claim | None:
    """The claim with another answer at each place where the reference stands, which the rule refuses.

    None where the reference does not stand in it word by word (4/2 or -2 for 2), or nothing wrong came of it. Numbers are whole as they
    are for the model's features (`claims.py`).
    """
    spot = re.compile(rf"(?<![\w.])(?<!\d[,/])(?<!-(?=\d)){re.escape(claim.reference)}(?!\w|[.,/]\d)", re.IGNORECASE)
    if not claim.reference or not spot.search(claim.completion):
        return None
    for _ in range(_NUM_TRIES):
        other = _another(claim.reference, generator)
        completion = spot.sub(other.replace("\\", r"\\"), claim.completion)
        if completion != claim.completion and not is_right(completion):
            return Claim(claim.question, claim.reference, completion)
    return None


def _another(answer: str, generator: np.random.Generator) -> str:
    """Something near: a number a little off or with digits changed, a word with letters changed."""
    if re.fullmatch(r"-?\d+", answer):
        kind = int(generator.integers(3))
        if kind == 0:
            return str(int(answer) + int(generator.choice([-10, -2, -1, 1, 2, 10])))
        if kind == 1 and int(answer) != 0:
            return str(-int(answer))
    return _one_character_else(answer, generator)


def _one_character_else(answer: str, generator: np.random.Generator) -> str:
    places = [place for place, character in enumerate(answer) if character.isalnum()]
    if not places:
        return answer + "x"
    place = int(generator.choice(places))
    pool = "0123456789" if answer[place].isdigit() else "abcdefghijklmnopqrstuvwxyz"
    other = str(generator.choice([character for character in pool if character != answer[place].lower()]))
    return answer[:place] + other + answer[place + 1 :]
