from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from wire.errors import ConfigError, SpecMismatch
from wire.spec import resolve_capture_spec, weights_revision


@pytest.fixture
def target_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "tiny"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"num_hidden_layers": 30, "hidden_size": 8, "vocab_size": 64}))
    (directory / "model.safetensors").write_bytes(bytes(range(256)) * 4096)
    (directory / "tokenizer.json").write_text("{}")
    return directory


def test_default_aux_layers_are_those_of_eagle3(target_dir: Path) -> None:
    assert resolve_capture_spec(target_dir, dtype="bfloat16", draft_vocab_size=32).aux_layer_ids == (2, 15, 27)


@pytest.mark.parametrize("size", [0, 64, 65])
def test_a_draft_vocabulary_must_be_smaller_than_the_targets(target_dir: Path, size: int) -> None:
    with pytest.raises(ConfigError, match=r"between 1 and 63"):
        resolve_capture_spec(target_dir, dtype="bfloat16", draft_vocab_size=size)


def test_aux_layers_must_exist(target_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"draft\.aux_layer_ids"):
        resolve_capture_spec(target_dir, dtype="bfloat16", draft_vocab_size=8, aux_layer_ids=(1, 31))


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a Hugging Face model directory"):
        resolve_capture_spec(tmp_path, dtype="bfloat16", draft_vocab_size=8)


@pytest.mark.parametrize("size", [None, "30", 0, [30]])
@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "vocab_size"])
def test_a_config_without_a_size_is_refused_by_name(target_dir: Path, key: str, size: object) -> None:
    config = json.loads((target_dir / "config.json").read_text()) | {key: size}
    (target_dir / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    with pytest.raises(ConfigError, match=rf"config\.json says {key} is"):
        resolve_capture_spec(target_dir, dtype="bfloat16", draft_vocab_size=8)


def test_a_config_that_is_no_object_is_refused(target_dir: Path) -> None:
    (target_dir / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="no JSON object"):
        resolve_capture_spec(target_dir, dtype="bfloat16", draft_vocab_size=8)


def test_weights_must_be_safetensors(target_dir: Path) -> None:
    (target_dir / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="safetensors"):
        weights_revision(target_dir)


def test_other_weights_have_another_revision(target_dir: Path) -> None:
    before = weights_revision(target_dir)
    assert weights_revision(target_dir) == before
    weights = bytearray((target_dir / "model.safetensors").read_bytes())
    weights[1000] ^= 1
    (target_dir / "model.safetensors").write_bytes(weights)
    assert weights_revision(target_dir) != before


def test_a_mismatch_names_every_differing_field(target_dir: Path) -> None:
    spec = resolve_capture_spec(target_dir, dtype="bfloat16", draft_vocab_size=32)
    other = msgspec.structs.replace(spec, dtype="float32", hidden_size=16)
    with pytest.raises(SpecMismatch, match=r"draft 3 belongs to .*dtype: 'float32', here 'bfloat16'; hidden_size: 16, here 8"):
        spec.require(other, who="draft 3")
    spec.require(spec, who="itself")
