"""The workers' side of the KV store: copies blocks out of the cache and into it, between the steps that read them.

Two threads do the store. All copies are made here, in the worker's own thread and on its stream, so they are in order with
the steps. No block is kept under a target version that did not compute all of its prefix.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from server.engine.host_rows import HostRows
from server.engine.kv_store_backend import BlockStore
from server.engine.kv_store_blocks import LayerTensors
from server.engine.kv_store_counts import LATE, LOADED, MIXED, STALE, StoreCounts
from server.engine.kv_store_layout import KvStoreLayout
from server.engine.kv_store_orders import BlockOrder, LoadOrder, SaveOrder, StepOrders, UseOrder
from server.engine.kv_store_reader import KvReader, Loaded
from server.engine.kv_store_writer import KvWriter
from wire.errors import ConfigError
from wire.kv_block_format import KvBlockHeader
from wire.kv_prefix import KvPrefix
from wire.spec import SCHEMA_VERSION

LOAD_TIMEOUT_S = 10.0
"""A prefix that the store has not supplied by then is computed instead."""
_UNKNOWN = -1


class StoreWorker:
    """Lives in one worker. `target_version` tells the version in force, which only changes between two steps."""

    def __init__(
        self,
        layout: KvStoreLayout,
        store: BlockStore,
        counts: StoreCounts,
        rank: int,
        num_blocks: int,
        caches: dict[str, torch.Tensor],
        target_version: Callable[[], int],
    ) -> None:
        for name, cache in caches.items():
            if cache.shape[0] != num_blocks:
                raise ConfigError(
                    f"the KV cache of {name} is {tuple(cache.shape)}, not in {num_blocks} blocks; turn the store off"
                )
        self._layout = layout
        self._rank = rank
        self._caches = caches
        self._block_bytes = sum(cache[0].nbytes for cache in caches.values())
        self._target_version = target_version
        self._versions = [_UNKNOWN] * num_blocks
        """Target version that computed each block of the cache, as of its first token."""
        self._loading: dict[str, tuple[LoadOrder, float]] = {}
        """By request: what it waits for, and until when."""
        self._sent_ids: set[str] = set()
        self._failed_block_ids: set[int] = set()
        self._counts = counts
        self._writer = KvWriter(store, counts)
        self._reader = KvReader(store, {name: cache[0] for name, cache in caches.items()}, counts)

    def begin_step(self, orders: StepOrders) -> None:
        """Carry out the scheduler's orders, copies first: the step may write the blocks they are made of."""
        version = self._target_version()
        for save in orders.saves:
            self._save(save, version)
        for use in orders.uses:
            self._writer.note_use(self._prefix(use, version), use.num_prompt_blocks, self._rank)
        for block_id in orders.begun_block_ids:
            self._versions[block_id] = version
        for load in orders.loads:
            self._loading[load.request_id] = (load, time.monotonic() + LOAD_TIMEOUT_S)
            self._reader.load(load, [self._header(block, load.tenant, version) for block in load.blocks])
        self._sent_ids.update(orders.finished_ids)

    def take_sent(self) -> set[str]:
        """Requests whose blocks are copied and may be freed."""
        sent, self._sent_ids = self._sent_ids, set()
        return sent

    def take_received(self) -> set[str]:
        """Requests whose loads ended, or took too long; what is missing is in `take_failed`."""
        ended = [loaded for loaded in self._reader.done() if self._loading.pop(loaded.order.request_id, None)]
        received = {self._fill(loaded) for loaded in ended}
        now_s = time.monotonic()
        for order in [order for order, until_s in self._loading.values() if until_s < now_s]:
            del self._loading[order.request_id]
            self._reader.abandon(order.request_id)
            self._counts.add(LATE, len(order.blocks))
            self._failed_block_ids.update(block.block_id for block in order.blocks)
            received.add(order.request_id)
        return received

    def take_failed(self) -> set[int]:
        """Ids of cache blocks that were promised and could not be filled; vLLM computes them."""
        failed, self._failed_block_ids = self._failed_block_ids, set()
        return failed

    def close(self) -> None:
        self._reader.close()
        self._writer.close()

    def _save(self, order: SaveOrder, version: int) -> None:
        num_pure = next(
            (i for i, block_id in enumerate(order.prefix_block_ids) if self._versions[block_id] != version),
            len(order.prefix_block_ids),
        )
        pure = [block for block in order.blocks if block.position < num_pure]
        self._counts.add(MIXED, len(order.blocks) - len(pure))
        if not pure or self._writer.refuses(len(pure), len(pure) * self._block_bytes):
            return
        for block in pure:
            rows = HostRows(*(_copy(cache[block.block_id]) for cache in self._caches.values()))
            tensors = partial(self._on_host, rows)
            self._writer.save(self._header(block, order.tenant, version), tensors, self._block_bytes)

    def _on_host(self, rows: HostRows) -> LayerTensors:
        return dict(zip(self._caches, rows.get(), strict=True))

    def _fill(self, loaded: Loaded) -> str:
        """Copy what was loaded into the cache; returns the request's id."""
        order, blocks = loaded.order, loaded.blocks
        if loaded.target_version != self._target_version():
            self._counts.add(STALE, len(order.blocks))
            blocks = []
        for block, tensors in zip(order.blocks, blocks, strict=False):
            for name, cache in self._caches.items():
                cache[block.block_id].copy_(tensors[name])
            self._versions[block.block_id] = loaded.target_version
        self._counts.add(LOADED, len(blocks), num_bytes=len(blocks) * self._block_bytes)
        self._failed_block_ids.update(block.block_id for block in order.blocks[len(blocks) :])
        return order.request_id

    def _prefix(self, use: UseOrder, version: int) -> KvPrefix:
        return KvPrefix(
            model=self._layout.model,
            layout_hash=self._layout.layout_hash,
            target_version=version,
            tenant=use.tenant,
            names=tuple(use.names),
            num_ranks=self._layout.num_ranks,
            part_bytes=self._block_bytes,
        )

    def _header(self, block: BlockOrder, tenant: str, version: int) -> KvBlockHeader:
        return KvBlockHeader(
            schema_version=SCHEMA_VERSION,
            model=self._layout.model,
            layout_hash=self._layout.layout_hash,
            target_version=version,
            tenant=tenant,
            name=block.name,
            parent=block.parent,
            position=block.position,
            rank=self._rank,
        )


def _copy(block: torch.Tensor) -> torch.Tensor:
    return block.clone(memory_format=torch.contiguous_format)
