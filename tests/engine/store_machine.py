"""A worker's side of the KV store with a cache of its own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from block_files import BLOCK_TOKENS, REALM, header, names_of
from waiting import wait_until

from server.engine.kv_store_backend import BlockStore
from server.engine.kv_store_counts import StoreCounts
from server.engine.kv_store_layout import KvStoreLayout
from server.engine.kv_store_orders import BlockOrder, LoadOrder, SaveOrder, StepOrders
from server.engine.kv_store_worker import StoreWorker

NUM_BLOCKS = 8
NAMES = names_of(4)
LAYOUT = KvStoreLayout("tiny", REALM.layout_hash, BLOCK_TOKENS, 1, True)


class Machine:
    """A worker's side with a cache of its own; steps as vLLM makes them."""

    def __init__(self, open_store: Callable[[StoreCounts], BlockStore], *, seed: int | None = None) -> None:
        generator = torch.Generator().manual_seed(seed or 0)
        shape = (NUM_BLOCKS, 2, BLOCK_TOKENS, 8)
        self.caches = {
            f"layer.{layer}": torch.zeros(shape) if seed is None else torch.randn(shape, generator=generator)
            for layer in range(3)
        }
        self.version = 0
        self.counts = StoreCounts()
        self.store = StoreWorker(LAYOUT, open_store(self.counts), self.counts, 0, NUM_BLOCKS, self.caches, lambda: self.version)
        self.counted: dict[str, int] = {}

    def begin(self, *block_ids: int) -> None:
        self.store.begin_step(StepOrders(begun_block_ids=list(block_ids)))

    def save(self, block_ids: list[int]) -> None:
        """All blocks of a prefix that lies in these blocks of the cache."""
        order = SaveOrder("default", block_ids, orders(block_ids))
        self.store.begin_step(StepOrders(saves=[order], finished_ids=["saved"]))
        assert self.store.take_sent() == {"saved"}

    def load(self, block_ids: list[int]) -> set[int]:
        """Blocks of the cache that could not be filled."""
        self.store.begin_step(StepOrders(loads=[LoadOrder("loading", "default", orders(block_ids))]))
        received: set[str] = set()
        wait_until(lambda: received.update(self.store.take_received()) or received)
        assert received == {"loading"}
        return self.store.take_failed()

    def count(self, event: str) -> int:
        for key, number in self.counts.take().items():
            self.counted[key] = self.counted.get(key, 0) + number
        return self.counted.get(event, 0)


def orders(block_ids: list[int]) -> list[BlockOrder]:
    return [
        BlockOrder(NAMES[position], header(NAMES, position).parent, position, block_id)
        for position, block_id in enumerate(block_ids)
    ]
