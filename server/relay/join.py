"""Where another engine takes up a broken answer: which token ids it is given, and how its text meets what the client has.

An engine's text lags behind its token ids: half a character waits for its other half, and where the client named stop strings,
as many characters wait as could begin one. So the text already sent may end in the middle of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens treated as the client asked."""

NUM_CONTEXT_TOKENS = 8
"""Prompt tokens decoded before the answer's: the first word of a text can look different from the same word further in."""
MAX_TOKENS_BACK = 64
"""Text lags by a few characters, so by fewer tokens."""


class CannotResume(Exception):
    """A broken stream cannot go on elsewhere; the message says why."""


@dataclass(frozen=True, slots=True)
class Join:
    """The place where the next engine goes on."""

    num_kept: int
    """Emitted ids it is given."""
    ahead: str
    """Text of the kept ids that the client does not have yet."""
    overlap: str
    """Text the client has of ids that were not kept: the next engine's text must begin with it."""


def find_join(decode: Decode, prompt_ids: Sequence[int], ids: Sequence[int], sent: str, stops: Sequence[str]) -> Join:
    """The last place where ids and sent text agree; raises CannotResume."""
    context = list(prompt_ids[-NUM_CONTEXT_TOKENS:])
    num_context_chars = len(decode(context))

    def text_of(num_ids: int) -> str:
        return decode([*context, *ids[:num_ids]])[num_context_chars:]

    for num_kept in range(len(ids), max(len(ids) - MAX_TOKENS_BACK, 0) - 1, -1):
        text = text_of(num_kept)
        ahead = text[len(sent) :]
        if text.startswith(sent) and "\ufffd" not in ahead and not _begins_stop(text, stops):
            return Join(num_kept, ahead, "")
        if sent.startswith(text):
            break
    else:
        raise CannotResume("the token ids do not give the text that was sent")
    if _begins_stop(text, stops):
        raise CannotResume("the text sent ends with what could begin a stop string")
    # The text sent ends within a token that may not be kept. Sampled anew it could be another one; that will show.
    return Join(num_kept, "", sent[len(text) :])


def _begins_stop(text: str, stops: Sequence[str]) -> bool:
    """Whether a stop string could begin in a text's last characters: the next engine would not see that beginning."""
    return any(text.endswith(stop[:length]) for stop in stops for length in range(1, len(stop)))
