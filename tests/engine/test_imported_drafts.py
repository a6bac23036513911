"""What vLLM computes of an imported draft is what `DraftCore` computes, for every variant of EAGLE-3 that import lets in.

Shape letters: T rows, D hidden, U draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from drafter.artifact import load_draft
from drafter.batch import RequestRows, pack
from drafter.create import import_draft
from drafter.geometry import geometry_for_target, vllm_config
from drafter.model import DraftCore
from drafter.target import load_target_parts
from wire.spec import CaptureSpec, read_model_config, resolve_capture_spec
from wire.store import DraftStore

NUM_ROWS = 9
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}


def publish(directory: Path, target_dir: Path, spec: CaptureSpec, layout: str, rope: dict[str, Any], **variants: bool) -> Path:
    """A random checkpoint of a shape that is not the target's."""
    torch.manual_seed(5)
    shape = {
        "num_heads": 8,
        "num_kv_heads": 2,
        "intermediate_size": 96,
        "rms_norm_eps": 1e-6,
        "rope": {"rope_parameters": rope},
    }
    core = DraftCore(replace(geometry_for_target(read_model_config(target_dir), spec), **shape, **variants))
    with torch.no_grad():
        for parameter in core.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    prefix = "layers.0." if layout == "speculators" else "midlayer."
    tensors = {name.replace("midlayer.", prefix): value for name, value in core.state_dict().items()}
    tensors["lm_head.weight"] = torch.randn(spec.draft_vocab_size, spec.hidden_size)
    tensors["d2t"] = torch.randperm(spec.vocab_size)[: spec.draft_vocab_size].sort().values - torch.arange(
        spec.draft_vocab_size
    )
    config = vllm_config(core.geometry)
    if layout == "speculators":
        config = {"speculators_model_type": "eagle3", "transformer_layer_config": config, **config}
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    ("layout", "rope", "variants"),
    [
        ("eagle", LINEAR, {"fc_norm": True, "norm_output": True}),
        ("eagle", YARN, {"attention_bias": True}),
        ("speculators", LLAMA3, {"norm_before_residual": True, "norm_before_fc": True}),
    ],
)
def test_vllm_computes_of_an_imported_draft_what_we_do(
    tiny_target: Path, tmp_path: Path, layout: str, rope: dict[str, Any], variants: dict[str, bool]
) -> None:
    spec = resolve_capture_spec(tiny_target, dtype="float32", draft_vocab_size=tiny.DRAFT_VOCAB)
    target, store = load_target_parts(tiny_target), DraftStore(tmp_path / "state")
    checkpoint = publish(tmp_path / "published", tiny_target, spec, layout, rope, **variants)
    version = import_draft(store, spec, tiny_target, checkpoint)
    draft = load_draft(store, version, spec, target)

    tokens_T = torch.randint(0, spec.vocab_size, (NUM_ROWS + 1,))
    aux_TX = torch.randn(NUM_ROWS, draft.core.geometry.aux_size)
    save_file({"tokens_T": tokens_T, "aux_TX": aux_TX}, tmp_path / "in.safetensors")
    program = [sys.executable, str(Path(__file__).with_name("vllm_draft.py")), str(tiny_target), str(store.directory(version))]
    subprocess.run([*program, str(tmp_path / "in.safetensors"), str(tmp_path / "out.safetensors")], check=True)
    theirs = load_file(tmp_path / "out.safetensors")

    request = RequestRows(torch.arange(NUM_ROWS), tokens_T[1:], aux_TX, torch.zeros(NUM_ROWS, spec.hidden_size), 1, 0.0)
    batch = pack([request], 2)
    with torch.inference_mode():
        outputs = draft.core.unroll(batch, target.embedding_VD.float(), 2)
    for output_AD, name, valid_A in zip(outputs, ("first_TV", "second_TV"), batch.valid_KA, strict=True):
        rows = batch.anchors_A[valid_A]
        theirs_AU = theirs[name][rows][:, draft.head.vocabulary.ids_U]
        torch.testing.assert_close((output_AD @ draft.head.weight_UD.T)[valid_A], theirs_AU, atol=1e-3, rtol=1e-3)
        assert len(rows) >= NUM_ROWS - 2
