"""Exact attention of the training unroll: causal over the target features, plus one own key per deeper step.

Shape letters: T rows, A anchors, N rows of one request, M its anchors, K own steps, H heads, J key/value heads, G heads per
key/value head, E head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drafter.batch import Batch


def attend(
    queries_AHE: Tensor,
    keys_TJE: Tensor,
    values_TJE: Tensor,
    own_keys: Sequence[Tensor],
    own_values: Sequence[Tensor],
    batch: Batch,
) -> Tensor:
    """Attention output [A, H*E]. An anchor sees its request's rows up to itself, then its own steps, all [A, J, E].

    Same result as a KV cache that holds target features for confirmed positions and the draft's own beyond them.
    """
    num_anchors, _, width = queries_AHE.shape
    num_kv_heads = keys_TJE.shape[1]
    queries_AJGE = (queries_AHE * width**-0.5).view(num_anchors, num_kv_heads, -1, width)
    own_scores = [(queries_AJGE * keys_AJE.unsqueeze(2)).sum(-1) for keys_AJE in own_keys]
    parts = []
    for bounds in batch.bounds:
        rows, anchors = slice(bounds.row_start, bounds.row_end), slice(bounds.anchor_start, bounds.anchor_end)
        scores_JMGK = [scores_AJG[anchors].transpose(0, 1).unsqueeze(-1) for scores_AJG in own_scores]
        values_MJE = [values_AJE[anchors] for values_AJE in own_values]
        parts.append(
            _attend_one(queries_AJGE[anchors], keys_TJE[rows], values_TJE[rows], bounds.bias_MN, scores_JMGK, values_MJE)
        )
    return torch.cat(parts)


def _attend_one(
    queries_MJGE: Tensor,
    keys_NJE: Tensor,
    values_NJE: Tensor,
    bias_MN: Tensor,
    own_scores: Sequence[Tensor],
    own_values: Sequence[Tensor],
) -> Tensor:
    num_anchors, num_kv_heads, group, width = queries_MJGE.shape
    num_rows = keys_NJE.shape[0]
    flat = queries_MJGE.transpose(0, 1).reshape(num_kv_heads, num_anchors * group, width)
    scores_JMGN = torch.bmm(flat, keys_NJE.permute(1, 2, 0)).view(num_kv_heads, num_anchors, group, num_rows)
    scores = torch.cat([scores_JMGN + bias_MN.unsqueeze(1), *own_scores], dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32)
    past = weights[..., :num_rows].reshape(num_kv_heads, num_anchors * group, num_rows)
    out = torch.bmm(past.to(values_NJE.dtype), values_NJE.transpose(0, 1)).view(num_kv_heads, num_anchors, group, width)
    for step, values_MJE in enumerate(own_values):
        out = out + weights[..., num_rows + step, None] * values_MJE.transpose(0, 1).unsqueeze(2)
    return out.transpose(0, 1).reshape(num_anchors, -1)
