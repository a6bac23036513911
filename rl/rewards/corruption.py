"""Wrong answers made of right ones, by changing what they state: negatives whose style tells nothing.

Cooper (arXiv 2508.05613) has another language model do this; for answers that are numbers or words a program can. Whether what comes
of it is wrong is the rule's to say.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from rl.rewards.claims import Claim

_NUM_TRIES = 4


def corruptions(claim: Claim, generator: np.random.Generator) -> Iterator[Claim]:
    """A few tries at the claim with another answer at each place where the reference stands.

    There are none where the reference does not stand in it word by word (4/2 or -2 for 2). Numbers are whole as they are for the model's features
    (`claims.py`).
    """
    spot = re.compile(rf"(?<![\w.])(?<!\d[,/])(?<!-(?=\d)){re.escape(claim.reference)}(?!\w|[.,/]\d)", re.IGNORECASE)
    if not claim.reference or not spot.search(claim.completion):
        return
    for _ in range(_NUM_TRIES):
        other = _another(claim.reference, generator)
        completion = spot.sub(other.replace("\\", r"\\"), claim.completion)
        if completion != claim.completion:
            yield Claim(claim.reference, completion)


def _another(answer: str, generator: np.random.Generator) -> str:
    """Something near: a whole number a little off, anything else with a character changed."""
    if re.fullmatch(r"-?\d+", answer):
        kind = int(generator.integers(3))
        if kind == 0:
            return str(int(answer) + int(generator.choice([-10, -2, -1, 1, 2, 10])))
        if kind == 1 and int(answer) != 0:
            return str(-int(answer))
    return _one_character_else(answer, generator)


def _one_character_else(answer: str, generator: np.random.Generator) -> str:
    """A digit where there is one: a letter changed in \\frac{1}{2} makes a command that no answer has."""
    places = [place for place, character in enumerate(answer) if character.isdigit()]
    places = places or [place for place, character in enumerate(answer) if character.isalnum()]
    if not places:
        return answer + "x"
    place = int(generator.choice(places))
    pool = "0123456789" if answer[place].isdigit() else "abcdefghijklmnopqrstuvwxyz"
    other = str(generator.choice([character for character in pool if character != answer[place].lower()]))
    return answer[:place] + other + answer[place + 1 :]
