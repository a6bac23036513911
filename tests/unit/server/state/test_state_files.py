"""The directory of KV blocks: a damaged file is never taken for a whole one, and eviction spares what is held or in use."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import msgspec
import pytest
from block_files import REALM, file_bytes, header, names_of, store_prefix

from wire import kv_blocks
from wire.errors import WireError
from wire.kv_block_format import check, seal, tenant_label
from wire.kv_files import Hold, KvDirectory, read_block


@pytest.fixture
def directory(tmp_path: Path) -> KvDirectory:
    return KvDirectory(tmp_path / "kv")


def test_a_sealed_file_tells_what_it_is() -> None:
    names = names_of(2)
    sealed = seal(file_bytes(header(names, 1)))
    found = check(sealed)
    assert (found.name, found.parent, found.position, found.tenant) == (names[1], names[0], 1, "default")


def test_a_tenant_that_looks_like_the_blank_checksum_is_told_from_it() -> None:
    tenant = tenant_label("0" * 64)
    sealed = seal(file_bytes(header(names_of(1), 0, REALM._replace(tenant=tenant))))
    assert check(sealed).tenant == tenant


def test_no_altered_byte_and_no_missing_byte_goes_unnoticed() -> None:
    sealed = seal(file_bytes(header(names_of(1), 0)))
    for position in range(len(sealed)):
        for altered in (sealed[position] ^ 1, sealed[position] ^ 0x80):
            with pytest.raises(WireError):
                check(sealed[:position] + bytes([altered]) + sealed[position + 1 :])
        with pytest.raises(WireError):
            check(sealed[:position])
    with pytest.raises(WireError):
        check(sealed + b"\0")


def test_a_file_of_another_schema_is_refused() -> None:
    other = msgspec.structs.replace(header(names_of(1), 0), schema_version=7)
    with pytest.raises(WireError, match="schema 7"):
        check(seal(file_bytes(other)))


def test_a_header_nested_without_end_is_refused() -> None:
    header_bytes = b'{"layer":' + b"[" * 100_000
    with pytest.raises(WireError):
        check(len(header_bytes).to_bytes(8, "little") + header_bytes)


def test_a_prefix_is_found_only_where_it_is_whole(directory: KvDirectory) -> None:
    names = names_of(3)
    paths = store_prefix(directory, names)
    assert [found.name for found in directory.prefix(REALM, names[-1])] == names
    assert [found.name for found in directory.prefix(REALM, names[1])] == names[:2]
    paths[1].unlink()
    assert directory.prefix(REALM, names[-1]) == []
    assert [found.name for found in directory.prefix(REALM, names[0])] == names[:1]


@pytest.mark.parametrize("tenant", ["default", "..", ".", "a/b", "../../etc", "ünï", "x" * 200, ""])
def test_any_tenant_name_stays_within_the_directory_and_apart_from_others(directory: KvDirectory, tenant: str) -> None:
    realm = REALM._replace(tenant=tenant_label(tenant))
    (path,) = store_prefix(directory, names_of(1), realm=realm)
    assert path.resolve().is_relative_to(directory.root.resolve())
    assert len(path.relative_to(directory.root).parts) == 4
    assert directory.realms() == [realm]
    assert not directory.has_block(REALM._replace(tenant="another"), names_of(1)[0], 1)


def test_a_block_counts_only_once_every_rank_has_stored_it(directory: KvDirectory) -> None:
    (name,) = names_of(1)
    store_prefix(directory, [name])
    assert directory.has_block(REALM, name, 1)
    assert not directory.has_block(REALM, name, 2)


def test_the_least_recently_used_blocks_go_first_and_held_ones_stay(directory: KvDirectory) -> None:
    old, held, young = (names_of(2, first_token=first) for first in (0, 100, 200))
    now_s = time.time()
    for names, age_s in ((old, 300.0), (held, 400.0), (young, 10.0)):
        store_prefix(directory, names, used_at_s=now_s - age_s)
    directory.set_hold(REALM, held[-1], Hold(names=tuple(held), is_pinned=True))
    each = next(directory.blocks()).num_bytes
    left, removed = directory.shrink(6 * each, leave_bytes=0)
    assert (left, removed) == (6 * each, 0)
    left, removed = directory.shrink(5 * each, leave_bytes=4 * each)
    assert (left, removed) == (4 * each, 2)
    assert [bool(directory.prefix(REALM, names[-1])) for names in (old, held, young)] == [False, True, True]
    left, removed = directory.shrink(0, leave_bytes=0)
    assert (left, removed) == (2 * each, 2)
    assert directory.prefix(REALM, held[-1])


def test_the_end_of_a_used_prefix_goes_before_its_start(directory: KvDirectory) -> None:
    names = names_of(4)
    paths = store_prefix(directory, names)
    directory.touch([*paths[:2], paths[0].with_name("gone"), *paths[2:]])
    num_bytes = sum(block.num_bytes for block in directory.blocks())
    directory.shrink(num_bytes - 1, leave_bytes=num_bytes // 2)
    assert [found.name for found in directory.prefix(REALM, names[1])] == names[:2]
    assert len(list(directory.blocks())) == 2


def test_nobody_else_on_the_machine_reads_what_was_said(directory: KvDirectory) -> None:
    store_prefix(directory, names_of(1))
    assert directory.root.stat().st_mode & 0o077 == 0


def test_a_hold_protects_its_own_tenant_only_and_a_lease_ends(directory: KvDirectory) -> None:
    names, other = names_of(1), REALM._replace(tenant="other")
    for realm in (REALM, other):
        store_prefix(directory, names, realm=realm)
    directory.set_hold(REALM, names[0], Hold(names=tuple(names), lease_until_s=time.time() + 600.0))
    assert directory.held(time.time()) == {(REALM, names[0])}
    assert directory.held(time.time() + 600.0) == set()
    directory.shrink(0, leave_bytes=0)
    assert [block.realm for block in directory.blocks()] == [REALM]


def test_a_hold_that_was_never_finished_holds_nothing(directory: KvDirectory) -> None:
    names = names_of(1)
    store_prefix(directory, names)
    hold = Hold(names=tuple(names), is_pinned=True)
    directory.set_hold(REALM, names[0], hold)
    (path,) = directory.root.rglob(f"holds/{names[0]}")
    path.rename(path.with_name(f".{path.name}-0123456789abcdef"))
    assert directory.held(time.time()) == set()


def test_a_hold_that_cannot_be_written_leaves_nothing_behind(directory: KvDirectory) -> None:
    names = names_of(1)
    (path,) = store_prefix(directory, names)
    in_the_way = path.parent / "holds" / names[0]
    in_the_way.mkdir(parents=True)  # A rename over a directory fails, as it would on a full disk.
    with pytest.raises(OSError, match=names[0]):
        directory.set_hold(REALM, names[0], Hold(names=tuple(names), is_pinned=True))
    assert list(in_the_way.parent.iterdir()) == [in_the_way]


def test_what_a_killed_writer_left_is_removed_in_time(directory: KvDirectory) -> None:
    (path,) = store_prefix(directory, names_of(1))
    leftover, fresh = (path.with_name(f".{path.name}-{digit * 16}") for digit in "01")
    for temporary in (leftover, fresh):
        temporary.write_bytes(b"half")
    os.utime(leftover, (0.0, 0.0))
    assert [block.path for block in directory.blocks()] == [path]
    assert (leftover.exists(), fresh.exists()) == (False, True)


def test_what_is_no_file_of_ours_is_neither_promised_nor_in_the_way(directory: KvDirectory) -> None:
    """A snapshot directory of a network disk, a pipe, a link to itself, in the places of blocks and of holds."""
    names = names_of(4)
    paths = store_prefix(directory, names[:1], used_at_s=1.0)
    realm_directory, holds = paths[0].parent, paths[0].parent / "holds"
    directory.block_path(REALM, names[1], 0).mkdir()
    os.mkfifo(directory.block_path(REALM, names[2], 0))
    directory.block_path(REALM, names[3], 0).symlink_to(f"{names[3]}.0")
    (realm_directory / ".snapshot").mkdir()
    (realm_directory / ".profile").write_text("somebody's")
    for path in (realm_directory / ".snapshot", realm_directory / ".profile"):
        os.utime(path, (1.0, 1.0))
    holds.mkdir()
    (holds / names[1]).mkdir()
    os.mkfifo(holds / names[2])
    (holds / names[3]).write_bytes(b'{"names": ["\xff"], "is_pinned": true}')
    assert [directory.has_block(REALM, name, 1) for name in names] == [True, False, False, False]
    assert directory.prefix(REALM, names[2]) == []
    assert [found.name for found in directory.headers(REALM)] == names[:1]
    assert directory.held(time.time()) == set()
    assert directory.shrink(1, leave_bytes=0) == (0, 1)
    assert (realm_directory / ".profile").read_text() == "somebody's"


def test_a_file_that_outgrew_a_block_is_not_read_into_memory(directory: KvDirectory) -> None:
    (path,) = store_prefix(directory, names_of(1))
    whole = read_block(path, tensor_bytes=64)
    assert whole == path.read_bytes()
    os.truncate(path, 1 << 40)
    with pytest.raises(WireError, match="bytes"):
        read_block(path, tensor_bytes=64)


def test_many_writers_of_one_block_leave_one_whole_file(directory: KvDirectory) -> None:
    names = names_of(1)
    path, data = directory.block_path(REALM, names[0], 0), file_bytes(header(names, 0), 4096 // 16)
    threads = [threading.Thread(target=directory.write, args=(path, data)) for _ in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if path.exists():
            check(path.read_bytes())
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_root_is_told_from_the_blocks_that_follow_it() -> None:
    assert all(kv_blocks.is_root(kv_blocks.root_name(size)) for size in (1, 16, 128, 1 << 20))
    assert not any(kv_blocks.is_root(bytes.fromhex(name)) for name in names_of(50))
