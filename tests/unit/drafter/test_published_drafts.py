from __future__ import annotations

import shutil

import pytest
import torch
from published_checkpoints import (
    DRAFT_VOCAB,
    IDS,
    NUM_HEADS,
    THETA,
    PublishedDraft,
    eagle_config,
    eagle_tensors,
    fc_norms,
    input_norm,
    speculators_config,
    speculators_tensors,
    write,
)
from safetensors.torch import load_file, save_file
from tiny_target import AUX_LAYER_IDS, HIDDEN, VOCAB

from drafter.artifact import load_draft
from drafter.batch import pack
from drafter.create import create_random_draft, import_draft
from drafter.reference import unroll_anchor
from wire.errors import ArtifactError
from wire.spec import resolve_capture_spec, weights_revision
from wire.store import DraftStore

DEPTH = 3


@pytest.fixture
def store(tmp_path) -> DraftStore:
    return DraftStore(tmp_path / "state")


def imported(store, spec, target_dir, target, directory):
    return load_draft(store, import_draft(store, spec, target_dir, directory), spec, target)


def assert_computes_as_published(draft, published, target, request):
    """Logits at every depth of every anchor, from the imported core and head, against the checkpoint's own tensors."""
    batch = pack([request], DEPTH)
    outputs = draft.core.unroll(batch, target.embedding_VD, DEPTH)
    positions, tokens = request.positions_T.tolist(), request.next_tokens_T.tolist()
    for anchor, row in enumerate(batch.anchors_A.tolist()):
        published.keys, published.values = [], []
        for earlier in range(row):
            published.step(tokens[earlier], published.feature(request.aux_TX[earlier]), positions[earlier])
        hidden_D = published.feature(request.aux_TX[row])
        steps = tokens[row : row + int(batch.valid_KA[:, anchor].sum())]
        obvious = unroll_anchor(draft.core, target.embedding_VD, request, row, steps)
        for depth, token in enumerate(steps):
            logits_U, hidden_D = published.step(token, hidden_D, positions[row] + depth)
            torch.testing.assert_close(draft.head.weight_UD @ outputs[depth][anchor], logits_U, atol=2e-4, rtol=2e-4)
            torch.testing.assert_close(outputs[depth][anchor], obvious[depth], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "variants",
    [
        {},
        {"norm_before_residual": True},
        {"norm_output": True},
        {"norm_before_residual": True, "norm_before_fc": True},
        {"fc_norm": True, "norm_output": True},
        {"attention_bias": True},
    ],
)
@pytest.mark.parametrize("layout", ["eagle", "speculators"])
def test_an_imported_draft_computes_what_its_checkpoint_does(
    store, target_dir, spec, target, make_request, tmp_path, layout, variants
):
    bias = variants.get("attention_bias", False)
    extra = (fc_norms() if variants.get("fc_norm") else {}) | (input_norm() if variants.get("norm_before_fc") else {})
    if layout == "eagle":
        tensors = eagle_tensors(torch.float16, bias=bias) | extra
        config = eagle_config(eagle_aux_hidden_state_layer_ids=list(AUX_LAYER_IDS), **variants)
    else:
        tensors = speculators_tensors(target.embedding_VD, bias=bias) | extra
        norms = {"norm_before_residual": False} | {key: on for key, on in variants.items() if key != "attention_bias"}
        config = speculators_config(layer={"attention_bias": bias}, **norms)
    draft = imported(store, spec, target_dir, target, write(tmp_path / "published", config, tensors))
    assert_computes_as_published(draft, PublishedDraft(tensors, target.embedding_VD, **variants), target, make_request(4, 9))
    assert torch.equal(draft.head.weight_UD, tensors["lm_head.weight"].float())
    assert torch.equal(draft.head.vocabulary.ids_U, IDS)
    assert torch.equal(draft.head.target_UD, target.head_VD[IDS])


def test_the_manifest_names_the_checkpoint(store, target_dir, spec, target, tmp_path):
    tensors = speculators_tensors(target.embedding_VD)
    directory = write(tmp_path / "org" / "name", speculators_config(), tensors)
    manifest = store.verify(import_draft(store, spec, target_dir, directory))
    assert manifest.origin == "imported"
    assert (manifest.source.format, manifest.source.path) == ("speculators", str(directory))
    assert manifest.source.weights_revision == weights_revision(directory)


@pytest.mark.parametrize("is_absent", [True, False])
def test_speculators_norms_the_residual_unless_it_says_no(store, target_dir, spec, target, tmp_path, is_absent):
    config = speculators_config(norm_before_residual=False)
    if is_absent:
        del config["norm_before_residual"]
    directory = write(tmp_path / "published", config, speculators_tensors(target.embedding_VD))
    assert imported(store, spec, target_dir, target, directory).core.geometry.norm_before_residual is is_absent


def test_a_checkpoint_without_aux_layers_means_those_of_eagle3(store, target_dir, spec, tmp_path):
    directory = write(tmp_path / "published", eagle_config(), eagle_tensors())
    with pytest.raises(ArtifactError, match=r"aux_layer_ids is \(2, 3, 3\), this system needs \(1, 3, 5\)"):
        import_draft(store, spec, target_dir, directory)


def test_aux_layers_may_stand_under_eagle_config(store, target_dir, spec, target, tmp_path):
    nested = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(AUX_LAYER_IDS), "norm_before_fc": True}
    directory = write(tmp_path / "published", eagle_config(eagle_config=nested), eagle_tensors() | input_norm())
    geometry = imported(store, spec, target_dir, target, directory).core.geometry
    assert geometry.aux_layer_ids == AUX_LAYER_IDS
    assert geometry.norm_before_fc


def test_a_null_number_of_layers_means_the_one_there_is(store, target_dir, spec, target, tmp_path):
    config = eagle_config(eagle_aux_hidden_state_layer_ids=list(AUX_LAYER_IDS), num_hidden_layers=None)
    directory = write(tmp_path / "published", config, eagle_tensors())
    assert imported(store, spec, target_dir, target, directory).core.geometry.aux_layer_ids == AUX_LAYER_IDS


def test_frozen_head_rows_are_recognised_after_rounding(store, target_dir, spec, target, tmp_path):
    frozen = {"lm_head.weight": target.head_VD[IDS].bfloat16()}
    directory = write(tmp_path / "published", speculators_config(), speculators_tensors(target.embedding_VD) | frozen)
    draft = imported(store, spec, target_dir, target, directory)
    assert draft.head.is_target_rows
    assert torch.equal(draft.head.weight_UD, target.head_VD[IDS])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_targets_embedding_is_recognised_in_any_dtype_and_never_published(store, target_dir, spec, target, tmp_path, dtype):
    directory = write(tmp_path / "published", speculators_config(), speculators_tensors(target.embedding_VD, dtype))
    version = import_draft(store, spec, target_dir, directory)
    assert "embed_tokens.weight" not in load_file(store.directory(version) / "model.safetensors")


def test_an_embedding_trained_further_is_refused(store, target_dir, spec, target, tmp_path):
    embedding_VD = target.embedding_VD.clone()
    embedding_VD[5] *= 1.02
    trained = {"embed_tokens.weight": embedding_VD}
    directory = write(tmp_path / "published", speculators_config(), speculators_tensors(target.embedding_VD) | trained)
    with pytest.raises(ArtifactError, match="own token embedding, whose row of token 5 is not the target's"):
        import_draft(store, spec, target_dir, directory)


def test_sharded_weights_are_joined_and_a_tensor_met_twice_is_refused(store, target_dir, spec, target, tmp_path):
    config = eagle_config(eagle_aux_hidden_state_layer_ids=list(AUX_LAYER_IDS))
    directory = write(tmp_path / "published", config, eagle_tensors())
    whole = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(whole)
    save_file({name: whole[name] for name in names[:5]}, directory / "model-00001-of-00002.safetensors")
    save_file({name: whole[name] for name in names[5:]}, directory / "model-00002-of-00002.safetensors")
    draft = imported(store, spec, target_dir, target, directory)
    assert torch.equal(draft.core.fc.weight, whole["fc.weight"].float())
    shutil.copy(directory / "model-00002-of-00002.safetensors", directory / "pytorch_model.safetensors")
    with pytest.raises(ArtifactError, match="second time; leave one set of weights"):
        import_draft(store, spec, target_dir, directory)


def test_a_pickle_is_refused_with_what_to_do(store, target_dir, spec, tmp_path):
    directory = write(tmp_path / "published", eagle_config(), {})
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(ArtifactError, match=r"pytorch_model\.bin, a pickle.*save it as safetensors"):
        import_draft(store, spec, target_dir, directory)
    (directory / "pytorch_model.bin").unlink()
    with pytest.raises(ArtifactError, match=r"no \*\.safetensors file"):
        import_draft(store, spec, target_dir, directory)


def test_a_draft_of_the_targets_shape_can_be_swapped_for_a_random_one(store, target_dir, spec, target, tmp_path):
    random = store.directory(create_random_draft(store, spec, target_dir))
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 24, "rms_norm_eps": 1e-5}
    config = eagle_config(**shape, eagle_aux_hidden_state_layer_ids=list(AUX_LAYER_IDS), rope_theta=10000.0)
    tensors = {name: value for name, value in load_file(random / "model.safetensors").items() if name != "d2t"}
    directory = write(tmp_path / "published", config, tensors | {"d2t": eagle_tensors()["d2t"]})
    other = store.directory(import_draft(store, spec, target_dir, directory))
    assert (other / "config.json").read_text() == (random / "config.json").read_text()


@pytest.mark.parametrize(
    ("scaling", "kind"),
    [
        ({"type": "linear", "factor": 2.0}, "linear"),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            "llama3",
        ),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, "yarn"),
    ],
)
def test_scaled_rope_keeps_its_kind_and_theta(store, target_dir, spec, target, tmp_path, scaling, kind):
    config = eagle_config(eagle_aux_hidden_state_layer_ids=list(AUX_LAYER_IDS), rope_scaling=scaling)
    core = imported(store, spec, target_dir, target, write(tmp_path / "published", config, eagle_tensors())).core
    rope = core.geometry.rope["rope_parameters"]
    assert (rope["rope_type"], rope["rope_theta"], rope["factor"]) == (kind, THETA, scaling["factor"])
    assert core.rope.frequencies[-1] < 0.99 * THETA ** (-4 / 6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 2 * HIDDEN}, "hidden_size is 32, this system needs 16"),
        ({"target_hidden_size": 64}, "target_hidden_size is 64, this system needs 16"),
        ({"vocab_size": VOCAB + 1}, "vocab_size is 65, this system needs 64"),
        ({"draft_vocab_size": 48}, r"draft_vocab_size is 48, this system needs 32.*Set draft\.vocab_size"),
        ({"draft_vocab_size": VOCAB}, "a head as large as the target's"),
        ({"draft_vocab_size": None}, "a head as large as the target's"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3]}, r"aux_layer_ids is \(1, 3\)"),
        ({"num_hidden_layers": 2}, "has 2 layers; only one-layer drafts"),
        ({"num_key_value_heads": 3}, f"num_attention_heads is {NUM_HEADS} and num_key_value_heads 3"),
        ({"num_attention_heads": 6}, "hidden_size is 16 and num_attention_heads 6"),
        ({"num_key_value_heads": 4}, r"k_proj\.weight has shape \(12, 32\), needed \(24, 32\)"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', needed 'silu'"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"qkv_bias": True}, "qkv_bias is True"),
        ({"attention_bias": True}, r"q_proj\.bias is missing"),
        ({"logit_scale": 0.25}, r"logit_scale is 0\.25"),
        ({"is_causal": False}, "is_causal is False"),
        ({"model_type": "qwen3"}, "model_type is 'qwen3'"),
        ({"architectures": ["PEagleDraftModel"]}, "architecture is PEagleDraftModel"),
        ({"layer_types": ["sliding_attention"]}, "its layer is sliding_attention"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is False"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is"),
        ({"norm_before_fc": True}, r"input_norm\.weight is missing"),
        ({"fc_norm": True}, r"fc_norm\.0\.weight is missing"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic', known are default, linear"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn rope lacks original_max_position_embeddings"),
        (
            {"rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
            r"default rope has mrope_section = \[1, 1, 2\]",
        ),
        ({"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}, r"partial_rotary_factor is 0\.5"),
        ({"hidden_size": "16"}, "hidden_size is '16', needed a whole number"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', needed an object"),
        ({"rope_scaling": {"rope_type": ["linear"]}}, r"rope_type is \['linear'\], known are default"),
        ({"architectures": [["LlamaForCausalLM"]]}, "needed a list of names"),
        ({"eagle_aux_hidden_state_layer_ids": 3}, "eagle_aux_hidden_state_layer_ids is 3, needed a list"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": ["a"]}}, r"is \['a'\], needed a list of whole numbers"),
        ({"norm_output": "false"}, "norm_output is 'false', needed true or false"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor of its rope is '2', needed a number"),
        ({"rms_norm_eps": None}, "lacks rms_norm_eps"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(store, target_dir, spec, tmp_path, changes, message):
    config = {"eagle_aux_hidden_state_layer_ids": list(AUX_LAYER_IDS)} | changes
    directory = write(tmp_path / "published", eagle_config(**config), eagle_tensors())
    with pytest.raises(ArtifactError, match=message):
        import_draft(store, spec, target_dir, directory)
    assert store.versions() == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculators_model_type": "peagle"}, "speculators_model_type is 'peagle', only 'eagle3'"),
        ({"transformer_layer_config": None}, "no transformer_layer_config"),
        ({"layer": {"model_type": "qwen3"}}, "model_type is 'qwen3'"),
        ({"layer": {"num_hidden_layers": 3}}, "has 3 layers"),
        ({"target_hidden_size": 32}, "target_hidden_size is 32"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "quantization_config is"),
    ],
)
def test_a_speculators_config_that_does_not_fit_is_refused(store, target_dir, spec, target, tmp_path, changes, message):
    directory = write(tmp_path / "published", speculators_config(**changes), speculators_tensors(target.embedding_VD))
    with pytest.raises(ArtifactError, match=message):
        import_draft(store, spec, target_dir, directory)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"lm_head.weight": None}, r"lm_head\.weight is missing"),
        ({"d2t": None}, "d2t is missing"),
        ({"d2t": IDS}, "d2t holds target ids"),
        ({"d2t": IDS - torch.arange(DRAFT_VOCAB) - 1}, "name different tokens"),
        ({"d2t": IDS, "t2d": None}, "d2t holds no offsets of this target"),
        ({"d2t": IDS.float()}, "d2t has dtype torch.float32, needed integers"),
        ({"midlayer.self_attn.q_norm.weight": torch.ones(6)}, r"q_norm\.weight is unknown"),
        ({"layers.1.mlp.up_proj.weight": torch.ones(2, 2)}, r"layers\.1\.mlp\.up_proj\.weight is unknown"),
        ({"fc.bias": torch.ones(HIDDEN)}, r"fc\.bias is unknown"),
        ({"mask_hidden": torch.ones(1, 48)}, "mask_hidden is unknown"),
        ({"fc.weight": torch.zeros(HIDDEN, 48, dtype=torch.float8_e4m3fn)}, "float8_e4m3fn, needed one of bfloat16"),
        ({"norm.weight": torch.full((HIDDEN,), torch.nan)}, r"norm\.weight is not all finite"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(store, target_dir, spec, tmp_path, tensors, message):
    config = eagle_config(eagle_aux_hidden_state_layer_ids=list(AUX_LAYER_IDS))
    kept = {name: value for name, value in (eagle_tensors() | tensors).items() if value is not None}
    with pytest.raises(ArtifactError, match=message):
        import_draft(store, spec, target_dir, write(tmp_path / "published", config, kept))
    assert store.versions() == []


def test_numbers_too_large_for_the_served_dtype_are_refused(store, target_dir, tmp_path):
    spec = resolve_capture_spec(target_dir, dtype="float16", draft_vocab_size=DRAFT_VOCAB, aux_layer_ids=AUX_LAYER_IDS)
    config = eagle_config(eagle_aux_hidden_state_layer_ids=list(AUX_LAYER_IDS))
    large = {"norm.weight": torch.full((HIDDEN,), 1e5)}
    with pytest.raises(ArtifactError, match=r"norm\.weight is not all finite numbers in float16"):
        import_draft(store, spec, target_dir, write(tmp_path / "published", config, eagle_tensors() | large))
