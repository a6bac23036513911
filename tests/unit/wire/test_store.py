from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from samples import fill

from wire.artifact import CONFIG_FILE, MANIFEST_FILE, WEIGHTS_FILE, DraftManifest
from wire.errors import ArtifactError
from wire.store import DraftStore


@pytest.fixture
def store(tmp_path: Path) -> DraftStore:
    return DraftStore(tmp_path)


def edit_manifest(directory: Path, edit: Callable[[dict], None]) -> None:
    path = directory / MANIFEST_FILE
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def test_versions_count_up_from_zero(store: DraftStore) -> None:
    assert store.versions() == []
    assert [store.publish(fill) for _ in range(3)] == [0, 1, 2]
    assert store.versions() == [0, 1, 2]


def test_a_version_is_never_used_again(store: DraftStore) -> None:
    store.publish(fill)
    (store.root / "7").mkdir()
    assert store.publish(fill) == 8
    assert store.versions() == [0, 8]


def test_a_version_is_not_used_again_after_its_folder_was_removed(store: DraftStore) -> None:
    store.publish(fill)
    assert store.publish(fill) == 1
    shutil.rmtree(store.directory(1))
    assert DraftStore(store.root.parent).publish(fill) == 2


@pytest.mark.parametrize("name", ["99999999999999999999", "007", "٣", "-1", "1e3"])
def test_what_is_not_named_like_a_version_counts_for_nothing(store: DraftStore, name: str) -> None:
    store.publish(fill)
    (store.root / name).mkdir()
    assert store.publish(fill) == 1
    assert store.versions() == [0, 1]


@pytest.mark.parametrize("content", [b"\xff", b"", b"many", b"99999999999999999999"])
def test_a_damaged_note_of_the_highest_version_is_passed_over(store: DraftStore, content: bytes) -> None:
    store.publish(fill)
    store.root.with_name("drafts.highest").write_bytes(content)
    assert store.publish(fill) == 1


def test_a_failed_publish_leaves_nothing(store: DraftStore) -> None:
    def fail(directory: Path, version: int) -> None:
        (directory / WEIGHTS_FILE).write_bytes(b"half")
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space"):
        store.publish(fail)
    assert list(store.root.iterdir()) == []


def test_nothing_is_visible_before_publish_returns(store: DraftStore) -> None:
    seen: list[list[int]] = []

    def look(directory: Path, version: int) -> None:
        fill(directory, version)
        seen.append(store.versions())

    store.publish(look)
    assert seen == [[]]


def test_a_published_artifact_verifies(store: DraftStore) -> None:
    assert store.verify(store.publish(fill)).version == 0


def test_pointers_follow_and_survive_a_new_store(store: DraftStore, tmp_path: Path) -> None:
    store.publish(fill)
    store.publish(fill)
    assert (store.active(), store.floor()) == (None, None)
    store.set_active(1)
    store.set_floor(0)
    again = DraftStore(tmp_path)
    assert (again.active(), again.floor()) == (1, 0)
    assert again.active_link.resolve() == again.directory(1).resolve()


def test_a_pointer_to_nothing_is_refused_and_the_old_one_stays(store: DraftStore) -> None:
    store.publish(fill)
    store.set_active(0)
    with pytest.raises(ArtifactError, match="draft 9 does not exist"):
        store.set_active(9)
    assert store.active() == 0


def test_a_directory_in_a_pointers_place_is_told_and_kept(store: DraftStore) -> None:
    store.publish(fill)
    (store.root / "active").mkdir()
    with pytest.raises(ArtifactError, match="move it away and try again"):
        store.set_active(0)
    assert sorted(path.name for path in store.root.iterdir()) == ["0", "active"]


def test_a_foreign_pointer_reads_as_none(store: DraftStore) -> None:
    store.publish(fill)
    os.symlink("../elsewhere", store.root / "active")
    assert store.active() is None


@pytest.mark.parametrize("version", [-1, "0", "../0", True, 1.0, None])
def test_only_a_non_negative_integer_names_a_version(store: DraftStore, version: object) -> None:
    with pytest.raises(ArtifactError, match="non-negative integer"):
        store.directory(version)  # type: ignore[arg-type]


def test_prune_keeps_active_its_parent_the_floor_and_the_newest(store: DraftStore) -> None:
    for _ in range(4):
        store.publish(fill)
    store.publish(lambda directory, version: fill(directory, version, parent=2))
    store.publish(fill)
    store.publish(fill)
    store.set_active(4)
    store.set_floor(0)
    assert store.prune(keep=1) == [1, 3, 5]
    assert store.versions() == [0, 2, 4, 6]


def test_prune_removes_what_a_crash_left(store: DraftStore) -> None:
    store.publish(fill)
    (store.root / ".staging-abc").mkdir()
    store.prune(keep=1)
    assert sorted(path.name for path in store.root.iterdir()) == ["0"]


def test_writers_of_several_threads_take_turns(store: DraftStore) -> None:
    def publish_slowly(directory: Path, version: int) -> None:
        time.sleep(0.01)
        fill(directory, version)

    def work(_number: int) -> int:
        version = DraftStore(store.root.parent).publish(publish_slowly)
        DraftStore(store.root.parent).prune(keep=100)
        return version

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(work, range(12))) == store.versions() == list(range(12))


def test_an_absent_draft_is_an_artifact_error(store: DraftStore) -> None:
    with pytest.raises(ArtifactError, match="does not exist"):
        store.verify(3)


TAMPERINGS: dict[str, tuple[Callable[[Path], object], str]] = {
    "weights altered": (lambda d: (d / WEIGHTS_FILE).write_bytes(b"weights x"), "checksum of model.safetensors"),
    "weights truncated": (lambda d: (d / WEIGHTS_FILE).write_bytes(b"wei"), "checksum of model.safetensors"),
    "weights gone": (lambda d: (d / WEIGHTS_FILE).unlink(), "cannot read model.safetensors"),
    "config altered": (lambda d: (d / CONFIG_FILE).write_text("{ }"), "checksum of config.json"),
    "manifest garbage": (lambda d: (d / MANIFEST_FILE).write_bytes(b"\xff\xfe"), "unreadable manifest.json"),
    "manifest nested without end": (
        lambda d: (d / MANIFEST_FILE).write_bytes(b'{"type": "draft_manifest", "more": ' + b"[" * 100_000),
        "unreadable manifest.json",
    ),
    "manifest gone": (lambda d: (d / MANIFEST_FILE).unlink(), "does not exist or was never finished"),
    "version changed": (lambda d: edit_manifest(d, lambda m: m.update(version=5)), "its manifest says version 5"),
    "schema changed": (lambda d: edit_manifest(d, lambda m: m.update(schema_version=99)), "has schema 99"),
    "checksum dropped": (
        lambda d: edit_manifest(d, lambda m: m["sha256"].pop(WEIGHTS_FILE)),
        "no checksum for model.safetensors",
    ),
    "path in a name": (lambda d: edit_manifest(d, lambda m: m["sha256"].update({"../x": "0"})), "not a plain file name"),
    "field of a wrong type": (lambda d: edit_manifest(d, lambda m: m.update(parent="zero")), "unreadable manifest.json"),
}


@pytest.mark.parametrize("name", TAMPERINGS)
def test_each_tampering_is_found_and_named(store: DraftStore, name: str) -> None:
    tamper, message = TAMPERINGS[name]
    directory = store.directory(store.publish(fill))
    tamper(directory)
    with pytest.raises(ArtifactError, match=message):
        store.verify(0)


def test_a_manifest_is_readable_json(store: DraftStore) -> None:
    store.publish(fill)
    content = json.loads((store.directory(0) / MANIFEST_FILE).read_text())
    assert content["type"] == "draft_manifest"
    assert msgspec.convert(content, DraftManifest) == store.manifest(0)
