"""Saving and loading KV blocks: bit for bit what was saved or nothing, bounded in bytes, and no fault of a disk goes further."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from block_files import REALM, header, names_of
from waiting import DEADLINE_S, wait_until

from server.engine import kv_store_files, kv_store_writer
from server.engine.kv_store_blocks import LayerTensors, decode_block, encode_block
from server.engine.kv_store_counts import DISK_ERROR, EVICTED, QUEUE_FULL, SAVED, STORE_FULL, StoreCounts
from server.engine.kv_store_files import FileStore
from server.engine.kv_store_writer import RETRY_S, KvWriter
from wire.errors import WireError
from wire.kv_block_format import KvBlockHeader, seal
from wire.kv_files import Hold, KvDirectory

NAMES = names_of(40)


def tensors(seed: int = 0, *, num_values: int = 64) -> LayerTensors:
    generator = torch.Generator().manual_seed(seed)
    return {f"layer.{layer}": torch.randn(2, num_values, generator=generator).to(torch.bfloat16) for layer in range(3)}


BLOCK_BYTES = sum(tensor.nbytes for tensor in tensors().values())
FILE_BYTES = len(encode_block(tensors(), header(NAMES, 0)))


class Disk:
    """A directory, a writer into it, and what it counted."""

    def __init__(self, root: Path, max_bytes: int) -> None:
        self.directory = KvDirectory(root)
        self.counts = StoreCounts()
        self.total: dict[str, int] = {}
        self.writer = KvWriter(FileStore(self.directory, max_bytes, self.counts), self.counts)

    def save(self, position: int, seed: int = 0) -> bool:
        """Whether the writer took it."""
        if self.writer.refuses(1, BLOCK_BYTES):
            return False
        self.writer.save(header(NAMES, position), lambda: tensors(seed), BLOCK_BYTES)
        return True

    def count(self, event: str) -> int:
        for key, number in self.counts.take().items():
            self.total[key] = self.total.get(key, 0) + number
        return self.total.get(event, 0)

    def wait_for(self, event: str, number: int) -> None:
        wait_until(lambda: self.count(event) >= number, f"for {number} {event}")

    def names(self) -> set[str]:
        return {block.name for block in self.directory.blocks()}


class Clock:
    """Stands still until a test moves it."""

    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The writer's."""
    clock = Clock()
    monkeypatch.setattr(kv_store_writer, "time", clock)
    return clock


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path / "kv", 10 * FILE_BYTES)
    yield disk
    disk.writer.close()


def test_a_block_is_loaded_bit_for_bit(disk: Disk) -> None:
    disk.save(0, seed=5)
    disk.wait_for(SAVED, 1)
    data = disk.directory.block_path(REALM, NAMES[0], 0).read_bytes()
    loaded, saved = decode_block(data, header(NAMES, 0), tensors()), tensors(5)
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    assert disk.count("saved_bytes") == len(data)


@pytest.mark.parametrize(
    ("expected", "like"),
    [
        (header(NAMES, 1), tensors()),
        (header(NAMES, 0, REALM._replace(tenant="another")), tensors()),
        (header(NAMES, 0, REALM._replace(target_version=1)), tensors()),
        (header(NAMES, 0), tensors(num_values=32)),
        (header(NAMES, 0), {name: tensor.float() for name, tensor in tensors().items()}),
        (header(NAMES, 0), {name: tensor for name, tensor in tensors().items() if name != "layer.2"}),
    ],
    ids=["block", "tenant", "target", "shape", "dtype", "layers"],
)
def test_a_whole_file_of_something_else_is_refused(expected: KvBlockHeader, like: LayerTensors) -> None:
    data = seal(encode_block(tensors(), header(NAMES, 0)))
    assert decode_block(data, header(NAMES, 0), tensors())
    with pytest.raises(WireError):
        decode_block(data, expected, like)


def test_the_directory_stays_within_its_bound_and_the_newest_stay(disk: Disk) -> None:
    for position in range(25):
        assert disk.save(position)
        disk.wait_for(SAVED, position + 1)
        assert sum(block.num_bytes for block in disk.directory.blocks()) <= 10 * FILE_BYTES
    assert disk.count(EVICTED) >= 15
    assert NAMES[24] in disk.names()
    assert NAMES[0] not in disk.names()


def test_two_engines_share_a_directory_and_its_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_store_files, "_RECOUNT_S", 0.0)
    disks = [Disk(tmp_path / "kv", 10 * FILE_BYTES) for _ in range(2)]
    try:
        for position in range(30):
            one = disks[position % 2]
            one.save(position)
            one.wait_for(SAVED, position // 2 + 1)
        assert sum(block.num_bytes for block in disks[0].directory.blocks()) <= 10 * FILE_BYTES
        other = disks[0]
        other.save(29)
        other.save(31)
        other.wait_for(SAVED, 16)
    finally:
        for one in disks:
            one.writer.close()
    assert disks[0].total[SAVED] == 16  # block 29 is there already


def test_saving_rests_while_everything_is_held(tmp_path: Path, clock: Clock) -> None:
    disk = Disk(tmp_path / "kv", 3 * FILE_BYTES)
    for position in range(3):
        disk.save(position)
    disk.wait_for(SAVED, 3)
    disk.directory.set_hold(REALM, NAMES[2], Hold(names=tuple(NAMES[:3]), is_pinned=True))
    disk.save(3)
    disk.wait_for(STORE_FULL, 1)
    assert not disk.save(4)
    assert disk.count(STORE_FULL) == 2
    assert disk.names() == set(NAMES[:3])
    disk.directory.set_hold(REALM, NAMES[2], Hold(names=tuple(NAMES[:3])))
    clock.now_s += RETRY_S
    assert disk.save(5)
    disk.wait_for(SAVED, 4)
    disk.writer.close()


def test_a_disk_that_refuses_is_counted_and_asked_again_later(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "kv").write_text("a file where the directory belongs")
    disk = Disk(tmp_path / "kv", 10 * FILE_BYTES)
    disk.save(0)
    disk.wait_for(DISK_ERROR, 1)
    assert not disk.save(1)
    assert disk.count(DISK_ERROR) == 2
    (tmp_path / "kv").unlink()
    clock.now_s += RETRY_S
    assert disk.save(2)
    disk.wait_for(SAVED, 1)
    disk.writer.close()
    assert disk.names() == {NAMES[2]}


def test_a_disk_slower_than_the_engine_costs_blocks_and_no_time(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_store_writer, "MAX_QUEUED_BYTES", 2 * BLOCK_BYTES)

    copied = threading.Event()

    def slow() -> LayerTensors:
        assert copied.wait(DEADLINE_S)
        return tensors()

    disk.writer.save(header(NAMES, 0), slow, BLOCK_BYTES)
    assert [disk.save(position) for position in (1, 2, 3)] == [True, False, False]
    assert disk.count(QUEUE_FULL) == 2
    copied.set()
    disk.wait_for(SAVED, 2)
    assert disk.save(4)


def test_the_last_of_a_disk_is_left_to_the_rest_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(tmp_path / "kv", 1 << 20)
    try:
        monkeypatch.setattr(kv_store_files, "RESERVED_BYTES", 1 << 60)
        assert disk.save(0)
        disk.wait_for(DISK_ERROR, 1)
        assert not disk.save(1)
        assert disk.names() == set()
    finally:
        disk.writer.close()


def test_a_block_that_cannot_be_copied_ends_nothing(tmp_path: Path, clock: Clock) -> None:
    def broken() -> LayerTensors:
        raise RuntimeError("the device is gone")

    disk = Disk(tmp_path / "kv", 1 << 20)
    try:
        disk.writer.save(header(NAMES, 0), broken, BLOCK_BYTES)
        disk.wait_for(DISK_ERROR, 1)
        clock.now_s += RETRY_S
        assert disk.save(1)
        disk.wait_for(SAVED, 1)
    finally:
        disk.writer.close()
