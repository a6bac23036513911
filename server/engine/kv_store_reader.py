"""KvReader: the thread that reads blocks from the store and verifies them. The copy into the cache is the worker's to do."""

from __future__ import annotations

import logging
import queue
from collections.abc import Mapping
from typing import NamedTuple

import torch

from server.engine.job_thread import JobThread
from server.engine.kv_store_backend import BlockStore
from server.engine.kv_store_blocks import LayerTensors, decode_block
from server.engine.kv_store_counts import CORRUPT, LOST, StoreCounts
from server.engine.kv_store_orders import LoadOrder
from wire.errors import WireError
from wire.kv_block_format import KvBlockHeader

logger = logging.getLogger(__name__)

_Job = tuple[LoadOrder, list[KvBlockHeader]]
"""What to load, and what each block must be."""


class Loaded(NamedTuple):
    """What came of one load."""

    order: LoadOrder
    target_version: int
    blocks: list[LayerTensors]
    """Of the first blocks of the order; the first that failed and all after it are missing."""


class KvReader:
    """Starts its thread at once. `like` has one block of every layer of the cache."""

    def __init__(self, store: BlockStore, like: Mapping[str, torch.Tensor], counts: StoreCounts) -> None:
        self._store = store
        self._like = like
        self._block_bytes = sum(tensor.nbytes for tensor in like.values())
        self._counts = counts
        self._abandoned: set[str] = set()
        self._done: queue.SimpleQueue[Loaded] = queue.SimpleQueue()
        self._thread: JobThread[_Job] = JobThread("paceline-kv-load", self._load, self._load_nothing)

    def load(self, order: LoadOrder, expected: list[KvBlockHeader]) -> None:
        """Queue a load; `expected` says what each block must be."""
        self._thread.put((order, expected))

    def done(self) -> list[Loaded]:
        """Loads that ended since the last call."""
        ended: list[Loaded] = []
        while not self._done.empty():
            ended.append(self._done.get())
        self._abandoned.difference_update(loaded.order.request_id for loaded in ended)
        return ended

    def abandon(self, request_id: str) -> None:
        """Nobody waits for that load any more: a store that fell behind must not stay behind."""
        self._abandoned.add(request_id)

    def close(self) -> None:
        self._thread.close()

    def _load(self, job: _Job) -> None:
        self._end(job, self._read_all(*job))

    def _load_nothing(self, job: _Job) -> None:
        self._end(job, [])

    def _end(self, job: _Job, blocks: list[LayerTensors]) -> None:
        order, expected = job
        self._done.put(Loaded(order, expected[0].target_version, blocks))

    def _read_all(self, order: LoadOrder, expected: list[KvBlockHeader]) -> list[LayerTensors]:
        blocks: list[LayerTensors] = []
        for header in expected:
            tensors = None if order.request_id in self._abandoned else self._read(header)
            if tensors is None:
                break
            blocks.append(tensors)
        return blocks

    def _read(self, expected: KvBlockHeader) -> LayerTensors | None:
        try:
            data = self._store.read(expected, tensor_bytes=self._block_bytes)
            tensors = decode_block(data, expected, self._like)
        except OSError as error:
            logger.warning("KV block %s cannot be read and is computed anew: %s", expected.name, error)
            self._counts.add(LOST)
            return None
        except WireError as error:
            logger.warning("KV block %s is removed and computed anew: %s", expected.name, error)
            self._counts.add(CORRUPT)
            self._store.discard(expected)
            return None
        return tensors
