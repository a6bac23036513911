"""The KV index: which engine holds which prefix blocks, as far as its events tell.

It can only err in what it does not know: a lost event or a forgotten block makes a prefix look shorter, and a wrong
entry costs a slower first token, never a wrong answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from wire.kv_blocks import BlockName, extend_chain, is_root, root_name

EngineHash = int | bytes
"""How an engine names a block in its events."""


class _Block:
    """One block one engine holds."""

    __slots__ = ("engine_hash", "holdings", "name", "num_copies", "parent")

    def __init__(self, holdings: _Holdings, engine_hash: EngineHash, name: BlockName, parent: BlockName) -> None:
        self.holdings = holdings
        self.engine_hash = engine_hash
        self.name = name
        self.parent = parent
        self.num_copies = 1
        """Engines do not merge equal blocks; each copy is stored and removed by its own event."""


class _Holdings:
    """What one engine holds."""

    def __init__(self) -> None:
        self.by_hash: dict[EngineHash, _Block] = {}
        self.by_name: dict[BlockName, _Block] = {}
        self.children: dict[BlockName, set[BlockName]] = {}
        """Outlives a removed parent: it may be stored again while its children stayed."""


class KvIndex:
    """Blocks of all engines, at most `max_blocks`; those not used for longest are forgotten first."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._holdings: dict[str, _Holdings] = {}
        self._ages: OrderedDict[_Block, None] = OrderedDict()
        """Oldest first; within one use of a chain its end is older than its start."""

    @property
    def num_blocks(self) -> int:
        return len(self._ages)

    def num_held(self, engine_id: str) -> int:
        """Blocks known to be in one engine."""
        holdings = self._holdings.get(engine_id)
        return len(holdings.by_hash) if holdings else 0

    def holders(self, name: BlockName) -> dict[str, list[BlockName]]:
        """By engine that holds a block and all before it: the names of that prefix, in order. Asking is no use."""
        prefixes = {engine_id: _prefix(holdings, name) for engine_id, holdings in self._holdings.items()}
        return {engine_id: prefix for engine_id, prefix in prefixes.items() if prefix}

    def store(
        self,
        engine_id: str,
        hashes: Sequence[EngineHash],
        parent_hash: EngineHash | None,
        token_ids: Sequence[int],
        block_size_tokens: int,
        extra_keys: Sequence[Any] = (),
        *,
        may_repeat: bool = False,
    ) -> bool:
        """Consecutive blocks an engine has filled; False where their parent is not known, so neither are they.

        `may_repeat` where the engine was asked to tell again what it reuses. It does so from a prompt's beginning on, and such
        an event cannot be told from one of further copies. Of those, one too few makes a prefix look shorter once; one too many
        would be believed for ever.
        """
        holdings = self._holdings.setdefault(engine_id, _Holdings())
        parent = root_name(block_size_tokens)
        if parent_hash is not None:
            known = holdings.by_hash.get(parent_hash)
            if known is None:
                return False
            parent = known.name
        counts_copies = parent_hash is not None or not may_repeat
        stored: list[_Block] = []
        for engine_hash, name in zip(hashes, extend_chain(parent, token_ids, block_size_tokens, extra_keys), strict=True):
            stored.append(self._hold(holdings, engine_hash, name, parent, counts_copies=counts_copies))
            parent = name
        self._use(stored)
        while len(self._ages) > self._max_blocks:
            self._forget_tree(next(iter(self._ages)))
        return True

    def remove(self, engine_id: str, hashes: Sequence[EngineHash]) -> None:
        """Blocks an engine has given up. Their children stay: they count again once the parent is back."""
        holdings = self._holdings.get(engine_id)
        if holdings is None:
            return
        for engine_hash in hashes:
            block = holdings.by_hash.get(engine_hash)
            if block is None:
                continue
            block.num_copies -= 1
            if block.num_copies == 0:
                self._drop(block)

    def clear(self, engine_id: str) -> None:
        """Forget all of one engine."""
        holdings = self._holdings.pop(engine_id, None)
        for block in holdings.by_hash.values() if holdings else ():
            del self._ages[block]

    def count_held(self, engine_id: str, names: Sequence[BlockName]) -> int:
        """How many of a prompt's first blocks an engine holds. Asking counts as use."""
        holdings = self._holdings.get(engine_id)
        if holdings is None:
            return 0
        held: list[_Block] = []
        for name in names:
            block = holdings.by_name.get(name)
            if block is None:
                break
            held.append(block)
        self._use(held)
        return len(held)

    def _hold(
        self, holdings: _Holdings, engine_hash: EngineHash, name: BlockName, parent: BlockName, *, counts_copies: bool
    ) -> _Block:
        block = holdings.by_hash.get(engine_hash)
        if block is not None and block.name == name:
            block.num_copies += int(counts_copies)
            return block
        # One engine's two hashes of one content, or two contents of one hash: the newest is what it now means.
        for stale in (block, holdings.by_name.get(name)):
            if stale is not None:
                self._drop(stale)
        block = _Block(holdings, engine_hash, name, parent)
        holdings.by_hash[engine_hash] = holdings.by_name[name] = block
        holdings.children.setdefault(parent, set()).add(name)
        self._ages[block] = None
        return block

    def _use(self, blocks: Sequence[_Block]) -> None:
        """A parent is at least as useful as its children, so it becomes the younger one."""
        for block in reversed(blocks):
            if block in self._ages:
                self._ages.move_to_end(block)

    def _drop(self, block: _Block) -> None:
        holdings = block.holdings
        del self._ages[block], holdings.by_hash[block.engine_hash], holdings.by_name[block.name]
        siblings = holdings.children[block.parent]
        siblings.discard(block.name)
        if not siblings:
            del holdings.children[block.parent]

    def _forget_tree(self, block: _Block) -> None:
        """A block and all that follows it, which no prompt could reach any more."""
        holdings = block.holdings
        pending = [block.name]
        while pending:
            name = pending.pop()
            pending += holdings.children.get(name, ())
            known = holdings.by_name.get(name)
            if known is not None:
                self._drop(known)


def _prefix(holdings: _Holdings, name: BlockName) -> list[BlockName]:
    """Empty where a part of it is missing."""
    prefix: list[BlockName] = []
    while not is_root(name):
        block = holdings.by_name.get(name)
        if block is None:
            return []
        prefix.append(name)
        name = block.parent
    return prefix[::-1]
