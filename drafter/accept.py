"""Acceptance simulated teacher-forced on captured requests: how far a draft would get from each position, without an engine.

Simulated AL is the mean over all judged positions. Served AL is the mean over those a verify step starts from, and which
these are depends on the draft itself. To compare two drafts the former is the fairer: both are judged on the same positions,
and every position is evidence. The two agree for a draft that is equally good everywhere; else they may differ.

vLLM drafts greedily by default, so a proposal counts as one-hot: at temperature 0 it is accepted where it equals the
emitted token, above that with the target's probability of it.

Shape letters: K depths, A anchors, T rows, D hidden, V target vocabulary, U draft vocabulary, C rows of one chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from drafter.batch import Batch, NoAnchor, RequestRows, pack, require_tokens
from drafter.head import Head
from drafter.model import DraftCore


@dataclass(frozen=True)
class Acceptance:
    """Probability of acceptance at each depth given that all depths before were accepted, [K, A]; 0 where not valid."""

    probability_KA: Tensor
    valid_A: Tensor
    """Anchors for which every depth could be judged."""
    positions_A: Tensor

    @property
    def length_A(self) -> Tensor:  # noqa: N802
        """Expected tokens per verify step from each anchor: 1 + sum of products."""
        return 1.0 + self.probability_KA.cumprod(0).sum(0)


def simulate(
    core: DraftCore,
    head: Head,
    embedding_VD: Tensor,
    target_head_VD: Tensor,
    request: RequestRows,
    depth: int,
    dtype: torch.dtype = torch.float32,
    max_context_rows: int | None = None,
    log_total_T: Tensor | None = None,
) -> Acceptance | None:
    """Acceptance of one request, in host memory; None where it has no anchor. Core, head and target parts are on one device.

    log_total_T [T]: `log_totals` of the request's rows, where the caller keeps them; needed above temperature 0 only.
    """
    try:
        batch = pack([request], depth, max_context_rows)
    except NoAnchor:
        return None
    require_tokens(batch, embedding_VD.shape[0])
    batch, ids_U = batch.to(embedding_VD.device), head.vocabulary.ids_U.to(embedding_VD.device)
    with torch.no_grad():
        outputs = core.unroll(batch, embedding_VD, depth, dtype)
    if request.temperature > 0:
        known_T = log_totals(request.hidden_TD, target_head_VD, request.temperature) if log_total_T is None else log_total_T
        log_total_T = known_T[-batch.positions_T.numel() :]
    rows = []
    for step, output_AD in enumerate(outputs):
        logits_AU = functional.linear(output_AD.to(head.weight_UD.dtype), head.weight_UD)
        proposed_A = ids_U[logits_AU.argmax(-1)]
        rows_A = batch.target_rows(step)
        if log_total_T is not None and request.temperature > 0:
            totals_A = log_total_T[rows_A]
            accepted_A = target_probability(batch.hidden_TD[rows_A], proposed_A, totals_A, target_head_VD, request.temperature)
        else:
            accepted_A = (proposed_A == batch.next_tokens_T[rows_A]).float()
        rows.append(accepted_A * batch.valid_KA[step])
    return Acceptance(torch.stack(rows).cpu(), judged_anchors(batch).cpu(), batch.positions_T[batch.anchors_A].cpu())


def judged_anchors(batch: Batch) -> Tensor:
    """Anchors [A] valid at every depth and whose deepest emitted token is known."""
    return batch.valid_KA.all(0) & (batch.next_tokens_T[batch.target_rows(batch.valid_KA.shape[0] - 1)] >= 0)


def log_totals(hidden_TD: Tensor, head_VD: Tensor, temperature: float) -> Tensor:
    """log of the target's softmax denominator at each row, [T]: the costly part, the same for every draft."""
    parts = []
    for chunk_CD in hidden_TD.split(128):
        parts.append((functional.linear(chunk_CD.to(head_VD), head_VD).float() / temperature).logsumexp(-1))
    return torch.cat(parts)


def target_probability(hidden_AD: Tensor, token_A: Tensor, log_total_A: Tensor, head_VD: Tensor, temperature: float) -> Tensor:
    """The target's probability of one token at each row, [A]."""
    rows_AD = head_VD[token_A]
    logits_A = (hidden_AD.to(head_VD.dtype).float() * rows_AD.float()).sum(-1) / temperature
    return (logits_A - log_total_A).exp().clamp(max=1.0)
