"""Versions of the target on disk: what a manifest may say, and what the store gives out."""

from __future__ import annotations

import json
import time
from pathlib import Path

import msgspec
import pytest
from samples import SPEC, fill_target

from wire.artifact import MANIFEST_FILE, WEIGHTS_FILE
from wire.errors import ArtifactError, SpecMismatch
from wire.target import TargetCanary, TargetManifest, TargetStore


@pytest.fixture
def store(tmp_path: Path) -> TargetStore:
    return TargetStore(tmp_path)


def test_versions_count_up_from_one_because_zero_is_the_targets_own_directory(store: TargetStore) -> None:
    assert [store.publish(fill_target) for _ in range(2)] == [1, 2]
    assert store.versions() == [1, 2]
    with pytest.raises(ArtifactError, match="target 0 does not exist"):
        store.verify(0)


def test_the_pointer_may_name_version_zero_and_whatever_is_there(store: TargetStore) -> None:
    assert (store.active(), store.active_since_s()) == (None, 0.0)
    version = store.publish(fill_target)
    for active in (0, version, 0):
        store.set_active(active)
        assert store.active() == active
        assert store.active_since_s() == pytest.approx(time.time(), abs=60.0)
    with pytest.raises(ArtifactError, match="target 7 does not exist; GET /admin/targets"):
        store.set_active(7)


def test_a_manifest_comes_back_as_it_was_written(store: TargetStore) -> None:
    manifest = store.verify(store.publish(fill_target))
    assert isinstance(manifest, TargetManifest)
    assert (manifest.version, manifest.base_revision) == (1, SPEC.target_revision)
    assert store.manifest(1) == manifest


def test_altered_weights_are_refused(store: TargetStore) -> None:
    version = store.publish(fill_target)
    store.weights(version).write_bytes(b"other weights")
    with pytest.raises(ArtifactError, match=f"target 1: checksum of {WEIGHTS_FILE}"):
        store.verify(version)


def test_a_draft_is_no_target(store: TargetStore) -> None:
    version = store.publish(fill_target)
    path = store.directory(version) / MANIFEST_FILE
    path.write_text(path.read_text().replace("target_manifest", "draft_manifest"))
    with pytest.raises(ArtifactError, match=r"target 1: unreadable manifest\.json"):
        store.manifest(version)


@pytest.mark.parametrize("field", ["target_id", "target_revision", "tokenizer_sha256"])
def test_a_version_of_another_target_is_refused(store: TargetStore, field: str) -> None:
    manifest = store.verify(store.publish(fill_target))
    manifest.require_base(SPEC)
    with pytest.raises(SpecMismatch, match="made from another target"):
        manifest.require_base(msgspec.structs.replace(SPEC, **{field: "another"}))


BAD_CANARIES = {
    "one token": {"token_ids": [1], "logprobs": []},
    "one logprob too few": {"logprobs": [-1.0]},
    "a probability above one": {"logprobs": [-1.0, 0.5]},
    "a negative id": {"token_ids": [1, -2, 3]},
    "no tolerance": {"max_mean_error": 0.0},
}


@pytest.mark.parametrize("kind", BAD_CANARIES)
def test_a_canary_that_contradicts_itself_is_refused(store: TargetStore, kind: str) -> None:
    version = store.publish(fill_target)
    path = store.directory(version) / MANIFEST_FILE
    content = json.loads(path.read_text())
    content["canary"] = {"token_ids": [1, 2, 3], "logprobs": [-1.0, -2.0], "max_mean_error": 0.1} | BAD_CANARIES[kind]
    path.write_text(json.dumps(content))
    with pytest.raises(ArtifactError, match="canary"):
        store.manifest(version)


def test_the_mean_error_is_infinite_where_an_engine_says_no_number() -> None:
    canary = TargetCanary(token_ids=(1, 2, 3), logprobs=(-1.0, -2.0), max_mean_error=0.1)
    assert canary.mean_error([-1.5, -2.25]) == pytest.approx(0.375)
    assert canary.mean_error([-1.0]) == float("inf")
    assert canary.mean_error([-1.0, float("nan")]) == float("inf")


def test_pruning_leaves_the_active_version_and_its_parent(store: TargetStore) -> None:
    for parent in (0, 1, 2, 3):
        store.publish(lambda directory, version, parent=parent: fill_target(directory, version, parent=parent))
    store.set_active(2)
    assert store.prune(keep=1) == [3]
    assert store.versions() == [1, 2, 4]
