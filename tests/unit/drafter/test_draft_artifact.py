from __future__ import annotations

import json
from dataclasses import replace

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter.artifact import load_draft, publish_draft
from drafter.create import create_random_draft, export_draft, import_draft, random_draft
from drafter.geometry import geometry_for_target, vllm_config
from wire.errors import ArtifactError, ConfigError, SpecMismatch
from wire.spec import read_model_config
from wire.store import DraftStore


@pytest.fixture
def store(tmp_path) -> DraftStore:
    return DraftStore(tmp_path / "state")


def test_config_names_what_vllm_reads(target_dir, spec):
    config = vllm_config(geometry_for_target(read_model_config(target_dir), spec))
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    assert config["draft_vocab_size"] == 32
    assert config["tie_word_embeddings"] is False
    assert config["rope_parameters"] == {"rope_theta": 10000.0, "rope_type": "default"}
    assert config["head_dim"] == 4


def test_random_draft_is_written_as_vllm_loads_it(store, target_dir, spec, target):
    version = create_random_draft(store, spec, target_dir, seed=1)
    tensors = load_file(store.directory(version) / "model.safetensors")
    assert {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "midlayer.self_attn.q_proj.weight"} <= tensors.keys()
    assert "embed_tokens.weight" not in tensors
    assert tensors["d2t"].dtype == torch.int64
    ids = tensors["d2t"] + torch.arange(32)
    assert torch.equal(tensors["lm_head.weight"], target.head_VD[ids])
    assert 60 in ids.tolist()
    assert store.verify(version).origin == "random"


def test_seed_decides_the_random_draft(target_dir, spec, target):
    a, b, c = (random_draft(spec, target_dir, target, seed).core.state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["fc.weight"], c["fc.weight"])


def test_draft_survives_the_disk(store, target_dir, spec, target):
    draft = random_draft(spec, target_dir, target, seed=4)
    version = publish_draft(store, draft, spec, origin="learned", parent=3)
    loaded = load_draft(store, version, spec, target)
    assert loaded.head.is_target_rows
    assert all(torch.equal(loaded.core.state_dict()[name], value) for name, value in draft.core.state_dict().items())
    assert store.manifest(version).parent == 3


def test_a_damaged_file_is_refused(store, target_dir, spec, target):
    version = create_random_draft(store, spec, target_dir)
    path = store.directory(version) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ArtifactError, match="checksum"):
        load_draft(store, version, spec, target)


def test_a_draft_of_another_target_is_refused(store, target_dir, spec, target):
    version = create_random_draft(store, spec, target_dir)
    with pytest.raises(SpecMismatch, match="target_revision"):
        load_draft(store, version, msgspec.structs.replace(spec, target_revision="other"), target)


def test_export_copies_what_vllm_needs_and_never_overwrites(store, target_dir, spec, tmp_path):
    version = create_random_draft(store, spec, target_dir)
    export_draft(store, version, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    with pytest.raises(ArtifactError, match="not empty"):
        export_draft(store, version, tmp_path / "out")


def checkpoint(tmp_path, target_dir, spec, *, rename=False, config=None, tensors=None):
    directory = tmp_path / "checkpoint"
    store = DraftStore(tmp_path / "elsewhere")
    export_draft(store, create_random_draft(store, spec, target_dir), directory)
    weights = load_file(directory / "model.safetensors")
    weights["lm_head.weight"] = torch.randn(32, 16, generator=torch.Generator().manual_seed(9))
    if rename:
        weights = {name.replace("midlayer.", "layers.0."): value for name, value in weights.items()}
    save_file(weights | (tensors or {}), directory / "model.safetensors")
    written = json.loads((directory / "config.json").read_text()) | (config or {})
    (directory / "config.json").write_text(json.dumps(written))
    return directory


@pytest.mark.parametrize("rename", [False, True])
def test_import_keeps_the_checkpoints_own_head(store, target_dir, spec, target, tmp_path, rename):
    version = import_draft(store, spec, target_dir, checkpoint(tmp_path, target_dir, spec, rename=rename))
    draft = load_draft(store, version, spec, target)
    assert not draft.head.is_target_rows
    assert torch.equal(draft.head.weight_UD, torch.randn(32, 16, generator=torch.Generator().manual_seed(9)))
    assert store.manifest(version).origin == "imported"


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({"draft_vocab_size": 31}, {}, "draft_vocab_size is 31, this system needs 32"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, {}, "aux_layer_ids"),
        ({"num_hidden_layers": 2}, {}, "2 layers"),
        ({"partial_rotary_factor": 0.25}, {}, "partial_rotary_factor is 0.25"),
        ({}, {"fc.weight": torch.zeros(16, 47)}, "fc.weight has shape"),
        ({}, {"norm.weight": torch.full((16,), float("nan"))}, "norm.weight is not all finite"),
        ({}, {"extra.weight": torch.zeros(1)}, "extra.weight is unknown"),
        ({}, {"embed_tokens.weight": torch.zeros(64, 16)}, "own token embedding"),
        ({}, {"d2t": torch.full((32,), 60)}, "distinct"),
    ],
)
def test_import_refuses_what_does_not_fit(store, target_dir, spec, tmp_path, config, tensors, message):
    with pytest.raises(ArtifactError, match=message):
        import_draft(store, spec, target_dir, checkpoint(tmp_path, target_dir, spec, config=config, tensors=tensors))
    assert store.versions() == []


def test_import_of_a_checkpoint_whose_config_is_no_object_is_refused(store, target_dir, spec, tmp_path):
    directory = checkpoint(tmp_path, target_dir, spec)
    (directory / "config.json").write_text("[]")
    with pytest.raises(ArtifactError, match="no JSON object"):
        import_draft(store, spec, target_dir, directory)


def test_import_of_nothing_is_refused(store, target_dir, spec, tmp_path):
    with pytest.raises(ArtifactError, match="not a directory"):
        import_draft(store, spec, target_dir, tmp_path / "absent")


def test_a_target_that_is_no_decoder_is_refused(target_dir, spec):
    with pytest.raises(ConfigError, match="lacks intermediate_size"):
        geometry_for_target({**read_model_config(target_dir), "intermediate_size": None}, spec)


@pytest.mark.parametrize(
    "config",
    [
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
        {"rope_scaling": {"rope_type": "llama3", "partial_rotary_factor": 0.5}},
    ],
)
def test_a_target_that_rotates_a_part_of_each_head_is_refused(target_dir, spec, config):
    with pytest.raises(ConfigError, match=r"share of 0\.5"):
        geometry_for_target({**read_model_config(target_dir), **config}, spec)
    whole = {**read_model_config(target_dir), "partial_rotary_factor": 1.0}
    assert geometry_for_target(whole, spec) == geometry_for_target(read_model_config(target_dir), spec)


def test_tied_target_lends_its_embedding_as_head(target_dir):
    from drafter.target import load_target_parts

    config = json.loads((target_dir / "config.json").read_text()) | {"tie_word_embeddings": True}
    (target_dir / "config.json").write_text(json.dumps(config))
    parts = load_target_parts(target_dir)
    assert parts.head_VD is parts.embedding_VD


def test_geometry_of_a_published_draft_is_the_targets(store, target_dir, spec, target):
    version = create_random_draft(store, spec, target_dir)
    loaded = load_draft(store, version, spec, target).core.geometry
    assert loaded == replace(geometry_for_target(read_model_config(target_dir), spec), rope=loaded.rope)
