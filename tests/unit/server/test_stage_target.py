"""A version of the target is refused while it is staged, wherever the engine could not swap it in, or not back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from samples import SPEC, fill_target
from waiting import wait_until

from server.engine.stage import Stage
from server.engine.stage_target import TargetLoader, read_shapes
from wire.artifact import WEIGHTS_FILE
from wire.errors import ArtifactError, SpecMismatch
from wire.spec import CaptureSpec, weights_revision
from wire.target import TargetStore

BASE = {"model.embed_tokens.weight": torch.arange(8.0).reshape(4, 2), "model.norm.weight": torch.ones(2)}


@pytest.fixture
def target_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "tiny"
    directory.mkdir()
    save_file(BASE, directory / WEIGHTS_FILE)
    return directory


@pytest.fixture
def spec(target_dir: Path) -> CaptureSpec:
    return msgspec.structs.replace(SPEC, target_revision=weights_revision(target_dir))


def publish(tmp_path: Path, spec: CaptureSpec, tensors: dict[str, torch.Tensor]) -> int:
    def fill(directory: Path, version: int) -> None:
        save_file(tensors, directory / WEIGHTS_FILE)
        fill_target(directory, version, spec=spec, has_weights=True)

    return TargetStore(tmp_path).publish(fill)


def loader(tmp_path: Path, spec: CaptureSpec) -> TargetLoader:
    return TargetLoader(TargetStore(tmp_path), spec, tmp_path / "tiny")


def test_a_version_with_the_bases_names_and_shapes_is_loaded_in_any_float_format(
    tmp_path: Path, target_dir: Path, spec: CaptureSpec
) -> None:
    version = publish(tmp_path, spec, {name: (tensor + 1).to(torch.bfloat16) for name, tensor in BASE.items()})
    weights = loader(tmp_path, spec)(version)
    assert torch.equal(weights.tensors["model.norm.weight"], torch.full((2,), 2.0, dtype=torch.bfloat16))
    assert weights.sha256 == TargetStore(tmp_path).manifest(version).sha256[WEIGHTS_FILE]


Spoil = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
BAD: dict[str, tuple[Spoil, str]] = {
    "a tensor less": (lambda tensors: {"model.norm.weight": tensors["model.norm.weight"]}, "missing"),
    "a tensor more": (lambda tensors: tensors | {"lm_head.weight": torch.zeros(4, 2)}, "unknown"),
    "another shape": (lambda tensors: tensors | {"model.norm.weight": torch.ones(3)}, "shape"),
    "no floats": (lambda tensors: tensors | {"model.norm.weight": torch.ones(2, dtype=torch.int64)}, "write float32"),
    "NaN": (lambda tensors: tensors | {"model.norm.weight": torch.tensor([1.0, float("nan")])}, "NaN"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_does_not_fit_the_base_is_refused(tmp_path: Path, target_dir: Path, spec: CaptureSpec, kind: str) -> None:
    spoil, reason = BAD[kind]
    version = publish(tmp_path, spec, spoil(dict(BASE)))
    with pytest.raises(ArtifactError, match=f"target {version}.*{reason}"):
        loader(tmp_path, spec)(version)


def test_a_version_of_another_target_is_refused(tmp_path: Path, target_dir: Path, spec: CaptureSpec) -> None:
    version = publish(tmp_path, SPEC, BASE)
    with pytest.raises(SpecMismatch, match="base_revision"):
        loader(tmp_path, spec)(version)


def test_version_zero_is_the_targets_directory_as_it_was_at_the_start(
    tmp_path: Path, target_dir: Path, spec: CaptureSpec
) -> None:
    load = loader(tmp_path, spec)
    assert torch.equal(load(0).tensors["model.embed_tokens.weight"], BASE["model.embed_tokens.weight"])
    save_file({name: tensor + 1 for name, tensor in BASE.items()}, target_dir / WEIGHTS_FILE)
    with pytest.raises(ArtifactError, match="no way back to target 0"):
        load(0)


def test_only_files_of_the_index_count_where_there_is_one(tmp_path: Path, target_dir: Path) -> None:
    save_file({"consolidated": torch.zeros(9)}, target_dir / "consolidated.safetensors")
    assert "consolidated" in read_shapes(target_dir)
    index = {"weight_map": dict.fromkeys(BASE, WEIGHTS_FILE)}
    (target_dir / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_shapes(target_dir) == {name: tuple(tensor.shape) for name, tensor in BASE.items()}


def test_staging_a_version_stages_the_way_back_first(tmp_path: Path, target_dir: Path, spec: CaptureSpec) -> None:
    stage = Stage(loader(tmp_path, spec), kind="target", max_held=3)
    stage.protect = {0}
    version = publish(tmp_path, spec, BASE)
    assert stage.versions() == []
    stage.begin(version)
    wait_until(lambda: stage.outcome(version), "for the version to be staged")
    assert stage.versions() == [0, version]


def test_a_version_is_not_staged_where_there_is_no_way_back(tmp_path: Path, target_dir: Path, spec: CaptureSpec) -> None:
    stage = Stage(loader(tmp_path, spec), kind="target", max_held=3)
    stage.protect = {0}
    version = publish(tmp_path, spec, BASE)
    (target_dir / WEIGHTS_FILE).rename(target_dir / "elsewhere")
    stage.begin(version)
    with pytest.raises(ValueError, match=r"no \*.safetensors"):
        wait_until(lambda: stage.outcome(version), "for the refusal")
    assert stage.versions() == []
