"""The admin routes of KV as state, over HTTP."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from block_files import REALM, names_of, store_prefix
from fastapi import FastAPI
from fastapi.testclient import TestClient

from server.public import install_error_shapes
from server.state.admin import state_routes
from server.state.posix import PosixState
from wire.kv_files import KvDirectory


@pytest.fixture
def directory(tmp_path: Path) -> KvDirectory:
    return KvDirectory(tmp_path / "kv")


@pytest.fixture
def client(directory: KvDirectory) -> TestClient:
    app = FastAPI()
    install_error_shapes(app)
    app.include_router(state_routes([PosixState(directory)]))
    return TestClient(app)


def get(client: TestClient, path: str) -> tuple[int, Any]:
    response = client.get(path)
    return response.status_code, response.json()


def test_a_prefix_is_located(client: TestClient, directory: KvDirectory) -> None:
    names = names_of(2)
    store_prefix(directory, names)
    status, answer = get(client, f"/admin/state?prompt_hash={names[-1]}")
    assert status == 200
    (found,) = answer["objects"]
    assert (found["id"], found["tenant"], found["block_hashes"]) == (names[-1], "default", names)
    assert found["locations"][0]["tier"] == "disk"
    assert get(client, "/admin/state?prompt_hash=" + "0" * 32) == (200, {"prompt_hash": "0" * 32, "objects": []})


@pytest.mark.parametrize("prompt_hash", ["", "0", "../../etc/passwd", "G" * 32, "0" * 33])
def test_anything_but_a_hash_is_refused(client: TestClient, prompt_hash: str) -> None:
    status, answer = get(client, f"/admin/state?prompt_hash={prompt_hash}")
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "bad_prompt_hash", "prompt_hash")


def test_usage_is_told_by_tenant(client: TestClient, directory: KvDirectory) -> None:
    assert get(client, "/admin/state/usage") == (200, {"tenants": []})
    store_prefix(directory, names_of(2), realm=REALM._replace(tenant="alpha"))
    status, answer = get(client, "/admin/state/usage")
    (usage,) = answer["tenants"]
    assert (status, usage["tier"], usage["tenant"], usage["num_blocks"]) == (200, "disk", "alpha", 2)
    assert usage["num_bytes"] > 0


def test_a_disk_that_does_not_answer_is_said(client: TestClient, directory: KvDirectory) -> None:
    store_prefix(directory, names_of(1))
    shutil.rmtree(directory.root)
    directory.root.write_text("not a directory")
    status, answer = get(client, "/admin/state/usage")
    assert (status, answer["error"]["code"]) == (503, "state_unavailable")
