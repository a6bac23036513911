"""The store between caches: one worker's blocks reach another's cache, and never those of other weights."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from block_files import BLOCK_TOKENS, REALM, header, names_of
from waiting import DEADLINE_S, wait_until

from server.engine import kv_store_worker
from server.engine.kv_store_counts import StoreCounts
from server.engine.kv_store_layout import KvStoreLayout
from server.engine.kv_store_orders import BlockOrder, LoadOrder, SaveOrder, StepOrders, UseOrder
from server.engine.kv_store_reader import KvReader
from server.engine.kv_store_worker import StoreWorker
from wire.errors import ConfigError
from wire.kv_files import KvDirectory

NUM_BLOCKS = 8
NAMES = names_of(4)


class Machine:
    """A worker's side with a cache of its own; steps as vLLM makes them."""

    def __init__(self, root: Path, *, seed: int | None = None) -> None:
        generator = torch.Generator().manual_seed(seed or 0)
        shape = (NUM_BLOCKS, 2, BLOCK_TOKENS, 8)
        self.caches = {
            f"layer.{layer}": torch.zeros(shape) if seed is None else torch.randn(shape, generator=generator)
            for layer in range(3)
        }
        self.version = 0
        layout = KvStoreLayout(root, 1 << 20, "tiny", REALM.layout_hash, BLOCK_TOKENS, 1, True)
        self.store = StoreWorker(layout, 0, NUM_BLOCKS, self.caches, lambda: self.version)
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
        for key, number in self.store.counts.take().items():
            self.counted[key] = self.counted.get(key, 0) + number
        return self.counted.get(event, 0)


def orders(block_ids: list[int]) -> list[BlockOrder]:
    return [
        BlockOrder(NAMES[position], header(NAMES, position).parent, position, block_id)
        for position, block_id in enumerate(block_ids)
    ]


@pytest.fixture
def first(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path / "kv", seed=1)
    yield machine
    machine.store.close()


@pytest.fixture
def second(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path / "kv")
    yield machine
    machine.store.close()


def wait_for_files(root: Path, number: int) -> None:
    wait_until(lambda: len(list(KvDirectory(root).blocks())) >= number)


def test_blocks_reach_another_cache_wherever_they_lie_there(first: Machine, second: Machine, tmp_path: Path) -> None:
    first.begin(2, 5, 3)
    first.save([2, 5, 3])
    wait_for_files(tmp_path / "kv", 3)
    assert second.load([7, 0, 1]) == set()
    for name, cache in first.caches.items():
        assert torch.equal(second.caches[name][[7, 0, 1]], cache[[2, 5, 3]])
        assert not second.caches[name][[2, 3, 4, 5, 6]].any()
    assert second.count("loaded") == 3
    second.save([7, 0, 1])  # loaded blocks may be saved again
    assert second.count("dropped_mixed") == 0


def test_a_copy_is_made_before_the_block_is_written_anew(first: Machine, second: Machine, tmp_path: Path) -> None:
    first.begin(2)
    kept = first.caches["layer.0"][2].clone()
    first.save([2])
    first.caches["layer.0"][2].zero_()
    wait_for_files(tmp_path / "kv", 1)
    assert second.load([0]) == set()
    assert torch.equal(second.caches["layer.0"][0], kept)


def test_a_request_that_ends_makes_its_prefix_young_again(first: Machine, tmp_path: Path) -> None:
    first.begin(2, 5)
    first.save([2, 5])
    wait_for_files(tmp_path / "kv", 2)
    paths = [KvDirectory(tmp_path / "kv").block_path(REALM, name, 0) for name in NAMES[:2]]
    for path in paths:
        os.utime(path, (0.0, 0.0))
    first.store.begin_step(StepOrders(uses=[UseOrder("default", NAMES[:2])]))
    first.store.close()
    assert time.time() - paths[0].stat().st_mtime < 60.0
    assert paths[0].stat().st_mtime > paths[1].stat().st_mtime > 0.0


def test_what_follows_a_missing_block_is_not_loaded(first: Machine, second: Machine, tmp_path: Path) -> None:
    first.begin(2, 5, 3)
    first.save([2, 5, 3])
    wait_for_files(tmp_path / "kv", 3)
    KvDirectory(tmp_path / "kv").block_path(REALM, NAMES[1], 0).unlink()
    assert second.load([7, 0, 1]) == {0, 1}
    assert (second.count("loaded"), second.count("lost")) == (1, 1)


def test_blocks_after_an_update_of_the_target_are_not_saved_with_a_prefix_from_before(first: Machine, tmp_path: Path) -> None:
    first.begin(2, 5)
    first.version = 1
    first.begin(3)
    first.save([2, 5, 3])
    assert first.count("dropped_mixed") == 3
    first.begin(2, 5)
    first.begin(3)
    first.save([2, 5, 3])
    wait_for_files(tmp_path / "kv", 3)
    assert {block.realm.target_version for block in KvDirectory(tmp_path / "kv").blocks()} == {1}


def test_kv_read_before_an_update_of_the_target_is_not_taken_after_it(
    first: Machine, second: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first.begin(2)
    first.save([2])
    wait_for_files(tmp_path / "kv", 1)
    done = KvReader.done

    def done_after_update(reader: KvReader) -> list[object]:
        second.version = 1
        return list(done(reader))

    monkeypatch.setattr(KvReader, "done", done_after_update)
    assert second.load([0]) == {0}
    assert (second.count("stale"), second.count("loaded")) == (1, 0)
    assert not second.caches["layer.0"].any()


def test_a_disk_that_takes_too_long_costs_its_time_limit_and_comes_too_late(
    first: Machine, second: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_store_worker, "LOAD_TIMEOUT_S", 0.2)
    read, answers, is_read = Path.read_bytes, threading.Event(), threading.Event()

    def read_late(path: Path) -> bytes:
        assert answers.wait(DEADLINE_S)
        data = read(path)
        is_read.set()
        return data

    first.begin(2)
    first.save([2])
    wait_for_files(tmp_path / "kv", 1)
    monkeypatch.setattr(Path, "read_bytes", read_late)
    assert second.load([0]) == {0}
    assert second.count("late") == 1
    answers.set()
    assert is_read.wait(DEADLINE_S)
    second.store.close()  # what the reader was at is done by then
    assert second.store.take_received() == set()
    assert not second.caches["layer.0"].any()


def test_a_load_given_up_on_just_after_it_ended_leaves_nothing_behind(first: Machine, tmp_path: Path) -> None:
    first.begin(2)
    first.save([2])
    wait_for_files(tmp_path / "kv", 1)
    reader = KvReader(KvDirectory(tmp_path / "kv"), {name: cache[0] for name, cache in first.caches.items()}, StoreCounts())
    reader.load(LoadOrder("late", "default", orders([0])), [header(NAMES, 0)])
    reader.close()  # it has ended, and nobody has asked yet
    reader.abandon("late")
    (loaded,) = reader.done()
    assert len(loaded.blocks) == 1
    assert not reader._abandoned


def test_a_cache_that_is_not_made_of_whole_blocks_is_refused(tmp_path: Path) -> None:
    layout = KvStoreLayout(tmp_path / "kv", 1 << 20, "tiny", REALM.layout_hash, BLOCK_TOKENS, 1, True)
    with pytest.raises(ConfigError, match="turn the store off"):
        StoreWorker(layout, 0, NUM_BLOCKS, {"layer": torch.zeros(2, NUM_BLOCKS, 4)}, lambda: 0)
