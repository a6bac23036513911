"""KV on a path as state: found where it is whole, kept while pinned or leased, removed only where nobody needs it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from block_files import REALM, names_of, store_prefix

from server.state.posix import PosixState
from server.state.store import StateHeld, StateNotFound, StateObject
from wire.kv_block_format import KvRealm
from wire.kv_files import KvDirectory

TENANTS = ("alpha", "beta")


@pytest.fixture
def directory(tmp_path: Path) -> KvDirectory:
    return KvDirectory(tmp_path / "kv")


@pytest.fixture
def store(directory: KvDirectory) -> PosixState:
    return PosixState(directory)


def stored(directory: KvDirectory, store: PosixState, names: list[str]) -> StateObject:
    store_prefix(directory, names)
    (state,) = store.locate(names[-1])
    return state


def test_an_object_tells_its_blocks_its_place_and_its_size(directory: KvDirectory, store: PosixState) -> None:
    names = names_of(3)
    state = stored(directory, store, names)
    (location,) = state.locations
    assert state.block_hashes == tuple(names)
    assert (state.kind, state.id, state.tenant, state.model, state.target_version) == ("kv", names[-1], "default", "tiny", 0)
    assert (location.tier, location.node, location.num_blocks) == ("disk", str(directory.root), 3)
    assert location.num_bytes == sum(block.num_bytes for block in directory.blocks())
    assert (state.pins, state.lease_until_s) == (0, 0.0)
    assert store.locate(names_of(1, first_token=9)[0]) == []


def test_each_tenant_and_each_target_version_has_its_own(directory: KvDirectory, store: PosixState) -> None:
    names = names_of(2)
    realms = [REALM._replace(tenant=tenant) for tenant in TENANTS] + [REALM._replace(tenant="alpha", target_version=1)]
    for realm in realms:
        store_prefix(directory, names, realm=realm)
    found = store.locate(names[-1])
    assert sorted((state.tenant, state.target_version) for state in found) == [("alpha", 0), ("alpha", 1), ("beta", 0)]
    alpha = next(state for state in found if state.tenant == "alpha" and state.target_version == 0)
    store.pin(alpha)
    assert [state.pins for state in store.locate(names[-1]) if state != alpha and state.pins] == [1]
    assert store.evict(next(state for state in found if state.tenant == "beta")) > 0
    assert {state.tenant for state in store.locate(names[-1])} == {"alpha"}


def test_usage_is_by_tenant(directory: KvDirectory, store: PosixState) -> None:
    for tenant, num_blocks in zip(TENANTS, (1, 3), strict=True):
        store_prefix(directory, names_of(num_blocks), realm=REALM._replace(tenant=tenant))
    each = next(directory.blocks()).num_bytes
    assert [(usage.tenant, usage.num_blocks) for usage in store.usage()] == [("alpha", 1), ("beta", 3)]
    assert sum(usage.num_bytes for usage in store.usage()) == pytest.approx(4 * each, rel=0.05)


def test_a_pinned_object_is_kept_until_it_is_unpinned(directory: KvDirectory, store: PosixState) -> None:
    state = store.pin(stored(directory, store, names_of(2)))
    assert state.pins == 1
    with pytest.raises(StateHeld, match="pinned"):
        store.evict(state)
    directory.shrink(0, leave_bytes=0)
    assert PosixState(directory).locate(state.id) == [state]
    assert store.unpin(store.pin(state)).pins == 0
    assert store.evict(state) > 0
    assert store.locate(state.id) == []


def test_a_lease_keeps_until_it_ends_and_never_shortens_another(directory: KvDirectory, store: PosixState) -> None:
    state = store.lease(stored(directory, store, names_of(2)), 30.0)
    assert state.lease_until_s == pytest.approx(time.time() + 30.0, abs=20.0)
    assert store.lease(state, 1.0).lease_until_s == state.lease_until_s
    with pytest.raises(StateHeld, match="leased for"):
        store.evict(state)
    brief = store.lease(stored(directory, store, names_of(1, first_token=50)), 0.05)
    time.sleep(0.1)
    assert store.evict(brief) > 0


def test_eviction_leaves_what_a_longer_or_a_held_prefix_needs(directory: KvDirectory, store: PosixState) -> None:
    long, short = names_of(4), names_of(4)[:2]
    store_prefix(directory, long)
    (shared,), (whole,) = store.locate(short[-1]), store.locate(long[-1])
    assert store.evict(shared) == 0
    store.pin(shared)
    each = next(directory.blocks()).num_bytes
    assert store.evict(whole) == pytest.approx(2 * each, rel=0.05)
    assert store.locate(long[-1]) == []
    assert store.locate(short[-1])[0].block_hashes == tuple(short)


def test_an_object_that_is_gone_is_refused(directory: KvDirectory, store: PosixState) -> None:
    state = stored(directory, store, names_of(2))
    directory.parts(REALM, state.block_hashes[0])[0].unlink()
    for operation in (
        store.pin,
        store.unpin,
        store.evict,
        lambda gone: store.lease(gone, 1.0),
        lambda gone: store.migrate(gone, "x"),
    ):
        with pytest.raises(StateNotFound, match="locate it again"):
            operation(state)


class ShrinkingDirectory(KvDirectory):
    """Files go between being listed and being looked at, as an engine's own bound has them go."""

    def parts(self, realm: KvRealm, name: str) -> list[Path]:
        paths = super().parts(realm, name)
        paths[0].unlink()
        return paths


def test_files_that_go_meanwhile_count_nothing(directory: KvDirectory) -> None:
    names = names_of(1)
    store_prefix(directory, names)
    (state,) = PosixState(ShrinkingDirectory(directory.root)).locate(names[-1])
    assert [location.num_bytes for location in state.locations] == [0]
    store_prefix(directory, names)
    (state,) = PosixState(directory).locate(names[-1])
    assert PosixState(directory).evict(state) > 0


def test_moving_costs_nothing_where_the_path_is_shared(directory: KvDirectory, store: PosixState) -> None:
    state = stored(directory, store, names_of(2))
    assert store.migrate(state, "decode-1") == state
