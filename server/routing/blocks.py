"""What an engine reuses of a prompt whose first blocks it holds. Blocks are named as `wire/kv_blocks.py` says."""

from __future__ import annotations


def reusable_tokens(num_held_blocks: int, num_prompt_tokens: int, block_size_tokens: int, *, speculative: bool) -> int:
    """Tokens an engine will not compute again, as it reports them, where it holds a prompt's first blocks.

    The last prompt token is always computed, for its logits, and only whole blocks are reused. A speculating engine
    computes the last matching block again as well: its draft needs the hidden states before the first new token.
    """
    num_blocks = min(num_held_blocks, (num_prompt_tokens - 1) // block_size_tokens)
    return max(0, num_blocks - int(speculative)) * block_size_tokens
