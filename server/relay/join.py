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
_REPLACEMENT = "\ufffd"
"""What half a character is decoded to. An engine that goes on after ids whose text ends with it, be it the real character, takes it
for a half and emits the text of everything before it again, prompt included (tokenizers' DecodeStream, primed with the prompt)."""


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
    """The last place where ids and sent text agree; raises CannotResume.

    The work is bounded by the stop strings' number and lengths, which are the caller's to bound.
    """
    context = list(prompt_ids[-NUM_CONTEXT_TOKENS:])
    num_context_chars = len(decode(context))
    begun: tuple[str, ...] | None = None
    for num_kept in range(len(ids), max(len(ids) - MAX_TOKENS_BACK, 0) - 1, -1):
        whole = decode([*context, *ids[:num_kept]])
        if whole.endswith(_REPLACEMENT):
            continue
        text = whole[num_context_chars:]
        if begun is None:
            begun = _begun_stops(stops, max_length=len(text))
        ahead = text[len(sent) :]
        # An engine would not see the beginning of a stop string in what it is given.
        if text.startswith(sent) and _REPLACEMENT not in ahead and not text.endswith(begun):
            return Join(num_kept, ahead, "")
        if sent.startswith(text):
            break
    else:
        raise CannotResume("the token ids do not give the text that was sent, or only up to half a character")
    if text.endswith(begun):
        raise CannotResume("the text sent ends with what could begin a stop string")
    # The text sent ends within a token that may not be kept. Sampled anew it could be another one; that will show.
    return Join(num_kept, "", sent[len(text) :])


def _begun_stops(stops: Sequence[str], *, max_length: int) -> tuple[str, ...]:
    """What a text of up to `max_length` characters ends with when a stop string may have begun in it."""
    return tuple(stop[:length] for stop in stops for length in range(1, min(len(stop), max_length + 1)))
