"""Soft punishment of answers that come near the limit. DAPO (arXiv 2503.14476, eq. 13)."""

from __future__ import annotations

from wire.errors import RolloutError


def overlong_penalty(num_tokens: int, max_tokens: int, buffer_tokens: int) -> float:
    """What an answer's length adds to its reward: 0 up to max_tokens - buffer_tokens, from there linearly to -1 at max_tokens.

    A buffer of 0 punishes nothing. Raises RolloutError unless 0 <= buffer_tokens <= max_tokens.
    """
    if not 0 <= buffer_tokens <= max_tokens:
        raise RolloutError(
            f"an overlong buffer of {buffer_tokens} tokens does not fit into answers of {max_tokens}; make it smaller"
        )
    if buffer_tokens == 0:
        return 0.0
    return -min(1.0, max(0.0, (num_tokens - (max_tokens - buffer_tokens)) / buffer_tokens))
