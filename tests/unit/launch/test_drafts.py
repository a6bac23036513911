from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from samples import fill

from launch.drafts import repair_active
from launch.plan import ProcessSpec, Readiness, RestartPolicy
from launch.up import repair_before_engine
from wire.artifact import WEIGHTS_FILE
from wire.store import DraftStore


@pytest.fixture
def store(tmp_path: Path) -> DraftStore:
    """Drafts 0, 1 and 2; 0 is the floor, 2 is active."""
    made = DraftStore(tmp_path)
    for _ in range(3):
        made.publish(fill)
    made.set_floor(0)
    made.set_active(2)
    return made


def spoil(store: DraftStore, version: int) -> None:
    (store.directory(version) / WEIGHTS_FILE).write_bytes(b"spoilt")


def process(store: DraftStore, role: str) -> ProcessSpec:
    return ProcessSpec(
        name="a",
        role=role,  # type: ignore[arg-type]
        argv=(),
        env={},
        cores=(),
        log_file=store.root / "a.log",
        readiness=Readiness(kind="alive", deadline_s=1.0),
        restart=RestartPolicy(is_required=True, max_backoff_s=1.0),
        memory_note="",
    )


def test_a_sound_active_draft_is_left_alone(store: DraftStore) -> None:
    repair_active(store, lambda text: pytest.fail(text))
    assert store.active() == 2


def test_an_absent_pointer_goes_to_the_floor(store: DraftStore) -> None:
    store.active_link.unlink()
    repair_active(store, lambda _text: None)
    assert store.active() == 0


def test_a_dangling_pointer_goes_to_the_floor(store: DraftStore) -> None:
    shutil.rmtree(store.directory(2))
    lines: list[str] = []
    repair_active(store, lines.append)
    assert store.active() == 0
    assert lines == ["the active draft (2) cannot be loaded: draft 0 is active now"]


def test_without_a_sound_floor_the_newest_sound_draft_is_taken(store: DraftStore) -> None:
    spoil(store, 2)
    spoil(store, 0)
    repair_active(store, lambda _text: None)
    assert store.active() == 1


def test_without_any_sound_draft_the_pointer_stays(store: DraftStore) -> None:
    for version in store.versions():
        spoil(store, version)
    lines: list[str] = []
    repair_active(store, lines.append)
    assert store.active() == 2
    assert "no draft in" in lines[0]


def test_only_an_engine_needs_the_repair(store: DraftStore) -> None:
    spoil(store, 2)
    repair_before_engine(process(store, "learner"), store, lambda text: pytest.fail(text))
    assert store.active() == 2
    repair_before_engine(process(store, "engine"), store, lambda _text: None)
    assert store.active() == 0


def test_what_cannot_be_repaired_is_told(store: DraftStore) -> None:
    store.active_link.unlink()
    store.active_link.mkdir()
    lines: list[str] = []
    repair_before_engine(process(store, "engine"), store, lines.append)
    assert "is a directory, where a link to a draft belongs" in lines[0]
