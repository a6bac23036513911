"""The store between caches: one worker's blocks reach another's cache, and never those of other weights."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from block_files import REALM, header
from store_machine import LAYOUT, NAMES, NUM_BLOCKS, Machine, orders
from waiting import DEADLINE_S, wait_until

from server.engine import kv_store_worker
from server.engine.kv_store_counts import StoreCounts
from server.engine.kv_store_files import FileStore
from server.engine.kv_store_orders import LoadOrder, StepOrders, UseOrder
from server.engine.kv_store_reader import KvReader
from server.engine.kv_store_worker import StoreWorker
from wire.errors import ConfigError
from wire.kv_files import KvDirectory


def files_at(root: Path) -> Callable[[StoreCounts], FileStore]:
    return partial(FileStore, KvDirectory(root), 1 << 20)


@pytest.fixture
def first(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(files_at(tmp_path / "kv"), seed=1)
    yield machine
    machine.store.close()


@pytest.fixture
def second(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(files_at(tmp_path / "kv"))
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
    first.store.begin_step(StepOrders(uses=[UseOrder("default", NAMES[:2], 1)]))
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
    files = files_at(tmp_path / "kv")(StoreCounts())
    reader = KvReader(files, {name: cache[0] for name, cache in first.caches.items()}, StoreCounts())
    reader.load(LoadOrder("late", "default", orders([0])), [header(NAMES, 0)])
    reader.close()  # it has ended, and nobody has asked yet
    reader.abandon("late")
    (loaded,) = reader.done()
    assert len(loaded.blocks) == 1
    assert not reader._abandoned


def test_a_cache_that_is_not_made_of_whole_blocks_is_refused(tmp_path: Path) -> None:
    files = files_at(tmp_path / "kv")(StoreCounts())
    with pytest.raises(ConfigError, match="turn the store off"):
        StoreWorker(LAYOUT, files, StoreCounts(), 0, NUM_BLOCKS, {"layer": torch.zeros(2, NUM_BLOCKS, 4)}, lambda: 0)
