"""One engine's place in the KV store: everything besides tokens, tenant and target version that stored blocks depend on."""

from __future__ import annotations

from typing import NamedTuple


class KvStoreLayout(NamedTuple):
    """One engine's place in the store."""

    model: str
    layout_hash: str
    block_size_tokens: int
    num_ranks: int
    drops_last_block: bool
    """A speculating engine computes the last matching block again: its draft reads one token ahead."""
