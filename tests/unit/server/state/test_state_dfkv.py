"""KV in DFKV as state: located where all of it is there, removed as a whole, everything else refused with its reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dfkv_rig
import msgspec
import pytest
from block_files import REALM, file_bytes, header, names_of
from fastapi import FastAPI
from fastapi.testclient import TestClient

from server.public import install_error_shapes
from server.state.admin import state_routes
from server.state.dfkv import DfkvState
from server.state.store import StateNotFound
from wire.dfkv import DfkvServers
from wire.kv_block_format import KvRealm
from wire.kv_dfkv import DfkvBlocks
from wire.kv_prefix import KvPrefix

NUM_RANKS = 2
OTHER = REALM._replace(tenant="other")


@pytest.fixture(params=dfkv_rig.KINDS)
def dfkv(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dfkv_rig.Dfkv]:
    with dfkv_rig.running(request.param, tmp_path) as dfkv:
        yield dfkv


@pytest.fixture
def blocks(dfkv: dfkv_rig.Dfkv) -> DfkvBlocks:
    return DfkvBlocks(dfkv.client())


@pytest.fixture
def state(dfkv: dfkv_rig.Dfkv) -> DfkvState:
    return DfkvState(dfkv.client(), DfkvServers(dfkv.settings))


@pytest.fixture
def client(state: DfkvState) -> TestClient:
    app = FastAPI()
    install_error_shapes(app)
    app.include_router(state_routes([state]))
    return TestClient(app)


def keep(blocks: DfkvBlocks, names: list[str], realm: KvRealm = REALM) -> None:
    """As two ranks of an engine do."""
    for position in range(len(names)):
        for rank in range(NUM_RANKS):
            part = msgspec.structs.replace(header(names, position, realm), rank=rank)
            blocks.write(part, file_bytes(part))
    blocks.note(KvPrefix(model="tiny", **realm._asdict(), names=tuple(names), num_ranks=NUM_RANKS, part_bytes=64))


def post(client: TestClient, operation: str, name: str, **fields: Any) -> tuple[int, Any]:
    reply = client.post(f"/admin/state/{operation}", json={"prompt_hash": name, **fields})
    return reply.status_code, reply.json()


def test_an_object_tells_its_blocks_its_place_and_its_size(dfkv: dfkv_rig.Dfkv, blocks: DfkvBlocks, state: DfkvState) -> None:
    names = names_of(3)
    keep(blocks, names)
    (located,) = state.locate(names[-1])
    assert (located.kind, located.id, located.block_hashes) == ("kv", names[-1], tuple(names))
    assert KvRealm(located.layout_hash, located.target_version or 0, located.tenant or "") == REALM
    (location,) = located.locations
    assert (location.tier, location.node, location.num_blocks, location.num_bytes) == ("dfkv", dfkv.settings.members, 3, 384)
    assert state.locate(names[0]) == []


def test_a_prefix_with_a_part_missing_is_not_found(blocks: DfkvBlocks, state: DfkvState) -> None:
    names = names_of(3)
    keep(blocks, names)
    part = msgspec.structs.replace(header(names, 0), rank=1)
    blocks.remove_part(part)
    assert state.locate(names[-1]) == []
    blocks.write(part, file_bytes(part))
    assert len(state.locate(names[-1])) == 1


def test_evicting_removes_the_object_of_one_tenant(blocks: DfkvBlocks, state: DfkvState) -> None:
    names = names_of(3)
    for realm in (REALM, OTHER):
        keep(blocks, names, realm)
    ours, theirs = state.locate(names[-1])
    assert state.evict(ours) == 384
    assert state.locate(names[-1]) == [theirs]
    assert blocks.has(REALM, names, 1) == [False] * 3
    with pytest.raises(StateNotFound, match="locate it again"):
        state.evict(ours)


@pytest.mark.parametrize(
    ("operation", "reason"), [("pin", "by use alone"), ("unpin", "no pin on it"), ("lease", "by use alone")]
)
def test_what_dfkv_has_no_call_for_is_refused_with_the_reason(
    blocks: DfkvBlocks, client: TestClient, operation: str, reason: str
) -> None:
    names = names_of(1)
    keep(blocks, names)
    status, answer = post(client, operation, names[0], **({"duration_s": 1.0} if operation == "lease" else {}))
    assert (status, answer["error"]["code"]) == (501, "state_unsupported")
    assert reason in answer["error"]["message"]


def test_usage_is_refused_rather_than_told_as_nothing(client: TestClient) -> None:
    reply = client.get("/admin/state/usage")
    assert (reply.status_code, reply.json()["error"]["code"]) == (501, "state_unsupported")
    assert "neither lists nor counts" in reply.json()["error"]["message"]


def test_an_operator_locates_and_evicts(blocks: DfkvBlocks, client: TestClient) -> None:
    names = names_of(2)
    keep(blocks, names)
    (found,) = client.get(f"/admin/state?prompt_hash={names[-1]}").json()["objects"]
    assert found["block_hashes"] == names
    status, answer = post(client, "evict", names[-1])
    assert (status, answer["freed_bytes"], answer["evicted"]["id"]) == (200, 256, names[-1])
    assert client.get(f"/admin/state?prompt_hash={names[-1]}").json()["objects"] == []


def test_servers_that_are_gone_are_said_and_not_taken_for_empty(
    dfkv: dfkv_rig.Dfkv, blocks: DfkvBlocks, client: TestClient
) -> None:
    names = names_of(1)
    keep(blocks, names)
    dfkv.kill()
    reply = client.get(f"/admin/state?prompt_hash={names[0]}")
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "state_unavailable")
    assert dfkv.settings.members in reply.json()["error"]["message"]
    assert post(client, "evict", names[0])[0] == 503
