"""`paceline draft import` from the command line, with a tiny target."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.cli import main
from launch.drafts import how_to_serve
from wire.store import DraftStore

sys.path.insert(0, str(Path(__file__).parent.parent / "drafter"))

from published_checkpoints import DRAFT_VOCAB, eagle_config, eagle_tensors, write
from tiny_target import AUX_LAYER_IDS, write_target

SETTINGS = [f"draft.vocab_size={DRAFT_VOCAB}", f"draft.aux_layer_ids={list(AUX_LAYER_IDS)}", "target.dtype=float32"]


@pytest.fixture
def paceline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command with a home, a target and settings of its own."""
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    target_dir = write_target(tmp_path / "tiny-target")
    overrides = [word for text in (f"target.path={target_dir}", *SETTINGS) for word in ("--set", text)]
    return lambda *words: main([*words, *overrides])


@pytest.fixture
def published(tmp_path: Path) -> Path:
    config = eagle_config(eagle_aux_hidden_state_layer_ids=list(AUX_LAYER_IDS))
    return write(tmp_path / "published", config, eagle_tensors())


def test_the_first_import_serves_and_is_the_floor(
    paceline: Callable[..., int], published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert paceline("draft", "import", str(published)) == 0
    assert capsys.readouterr().out == f"draft 0 from {published}: active\n"
    store = DraftStore(tmp_path / "state")
    assert (store.active(), store.floor()) == (0, 0)


def test_list_and_show_name_where_a_draft_came_from(
    paceline: Callable[..., int], published: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert paceline("draft", "init") == 0
    assert paceline("draft", "import", str(published)) == 0
    capsys.readouterr()
    assert paceline("draft", "list") == 0
    _, random, imported = capsys.readouterr().out.splitlines()
    assert random.endswith("active floor")
    assert "imported" in imported
    assert imported.endswith(f"from {published} (eagle)")
    assert paceline("draft", "show", "1") == 0
    source = json.loads(capsys.readouterr().out)["source"]
    assert (source["format"], source["path"]) == ("eagle", str(published))


def test_a_draft_made_twice_of_the_same_says_so(paceline: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    for more in ((), (), ("--set", "draft.seed=1")):
        assert paceline("draft", "init", *more) == 0
    first, second, other = capsys.readouterr().out.splitlines()
    assert (first, other) == ("draft 0", "draft 2")
    assert second.startswith("draft 1, equal to draft 0")


def test_a_later_import_says_how_it_can_serve(paceline: Callable[..., int], published: Path, tmp_path: Path) -> None:
    paceline("draft", "init")
    paceline("draft", "import", str(published))
    paceline("draft", "init")
    store = DraftStore(tmp_path / "state")
    assert (store.active(), store.floor()) == (0, 0)
    assert "draft 0, which is active, has another shape" in how_to_serve(store, 1)
    assert "`paceline draft activate 2 --force`" in how_to_serve(store, 2)


def test_what_does_not_fit_is_one_message_and_no_draft(
    paceline: Callable[..., int], published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (published / "config.json").write_text(json.dumps(eagle_config(hidden_act="gelu")))
    assert paceline("draft", "import", str(published)) == 2
    assert capsys.readouterr().err.startswith("paceline: checkpoint published would not compute here what it was trained to: ")
    assert paceline("draft", "import", str(tmp_path / "absent")) == 2
    assert "is not a directory" in capsys.readouterr().err
    assert DraftStore(tmp_path / "state").versions() == []
