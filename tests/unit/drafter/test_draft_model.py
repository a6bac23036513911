from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from drafter.batch import pack
from drafter.geometry import geometry_for_target
from drafter.model import DraftCore
from drafter.reference import unroll_anchor
from wire.spec import read_model_config


def build_core(target_dir, spec, **variants) -> DraftCore:
    torch.manual_seed(3)
    core = DraftCore(replace(geometry_for_target(read_model_config(target_dir), spec), **variants))
    with torch.no_grad():
        for parameter in core.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return core


@pytest.mark.parametrize(
    "variants",
    [
        {},
        {"norm_before_residual": True, "norm_output": True},
        {"norm_before_fc": True},
        {"fc_norm": True},
        {"attention_bias": True},
    ],
)
def test_unroll_equals_token_by_token_reference(target_dir, spec, target, make_request, variants):
    core = build_core(target_dir, spec, **variants)
    requests = [make_request(5, 12, seed=1), make_request(3, 9, seed=2)]
    batch = pack(requests, depth=3)
    outputs = core.unroll(batch, target.embedding_VD, 3)
    for request, bounds in zip(requests, batch.bounds, strict=True):
        for anchor in range(bounds.anchor_start, bounds.anchor_end):
            row = int(batch.anchors_A[anchor]) - bounds.row_start
            depths = int(batch.valid_KA[:, anchor].sum())
            tokens = request.next_tokens_T[row : row + depths].tolist()
            expected = unroll_anchor(core, target.embedding_VD, request, row, tokens)
            for depth in range(depths):
                torch.testing.assert_close(outputs[depth][anchor], expected[depth], atol=1e-5, rtol=1e-4)


def test_unroll_skips_gaps_as_a_cache_without_these_rows_would(target_dir, spec, target, make_request):
    core = build_core(target_dir, spec)
    request = make_request(6, 16, missing=(0, 1, 2, 3, 9))
    batch = pack([request], depth=2)
    outputs = core.unroll(batch, target.embedding_VD, 2)
    positions = request.positions_T[batch.anchors_A].tolist()
    assert 8 not in positions
    assert 7 in positions
    for anchor, row in enumerate(batch.anchors_A.tolist()):
        depths = int(batch.valid_KA[:, anchor].sum())
        expected = unroll_anchor(core, target.embedding_VD, request, row, request.next_tokens_T[row : row + depths].tolist())
        for depth in range(depths):
            torch.testing.assert_close(outputs[depth][anchor], expected[depth], atol=1e-5, rtol=1e-4)


def test_packing_changes_no_result(target_dir, spec, target, make_request):
    core = build_core(target_dir, spec)
    requests = [make_request(5, 12, seed=1), make_request(3, 9, seed=2)]
    together = core.unroll(pack(requests, 2), target.embedding_VD, 2)
    alone = [core.unroll(pack([request], 2), target.embedding_VD, 2) for request in requests]
    for depth in range(2):
        torch.testing.assert_close(together[depth], torch.cat([outputs[depth] for outputs in alone]), atol=1e-6, rtol=1e-5)


def test_cutting_the_context_keeps_anchors_and_changes_no_position(target_dir, spec, make_request):
    request = make_request(10, 16)
    whole, cut = pack([request], 2), pack([request], 2, max_context_rows=3)
    assert torch.equal(whole.positions_T[whole.anchors_A], cut.positions_T[cut.anchors_A])
    assert cut.positions_T[0] == 6


def test_bfloat16_products_stay_close(target_dir, spec, target, make_request):
    core = build_core(target_dir, spec)
    batch = pack([make_request(5, 12)], 3)
    exact = core.unroll(batch, target.embedding_VD, 3)
    rounded = core.unroll(batch, target.embedding_VD, 3, torch.bfloat16)
    for a, b in zip(exact, rounded, strict=True):
        assert (a - b).norm() / a.norm() < 0.05


def test_scaled_rope_follows_transformers(target_dir, spec):
    geometry = geometry_for_target(read_model_config(target_dir), spec)
    scaled = {"rope_theta": 10000.0, "rope_type": "linear", "factor": 2.0}
    plain = DraftCore(geometry).rope.frequencies
    slower = DraftCore(replace(geometry, rope={"rope_parameters": scaled})).rope.frequencies
    torch.testing.assert_close(slower, plain / 2)
