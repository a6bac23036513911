"""The training objective of one batch: unroll, head, loss, credit. One place joins the parts.

Shape letters: A anchors, T rows, K depths, D hidden, U draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from drafter.batch import Batch
from drafter.head import Head
from drafter.losses import soft_cross_entropy
from drafter.model import DraftCore
from drafter.teacher import TeacherRows


@dataclass(frozen=True)
class Objective:
    """loss: weighted mean KL to the target, nats, with a gradient; agreement_K: share of valid anchors whose best token
    is the target's, each depth on its own."""

    loss: Tensor
    agreement_K: Tensor


def objective(
    core: DraftCore,
    batch: Batch,
    teacher: TeacherRows,
    head: Head,
    embedding_VD: Tensor,
    weights_KA: Tensor,
    dtype: torch.dtype = torch.float32,
    total_weight: Tensor | None = None,
) -> Objective:
    """Objective of a batch whose teacher rows are concatenated in the batch's row order; weights_KA from `drafter.credit`.

    total_weight: sum of the weights of the whole batch, where this is a share of it; the shares' losses then add up.
    """
    depth = weights_KA.shape[0]
    outputs = core.unroll(batch, embedding_VD, depth, dtype)
    total = torch.zeros((), device=weights_KA.device)
    agreement = []
    for step, output_AD in enumerate(outputs):
        rows_A = batch.target_rows(step)
        weight_A = weights_KA[step]
        head_sum, _, best_A = soft_cross_entropy(output_AD, head.weight_UD, teacher.expected_TD[rows_A], weight_A)
        total = total + head_sum - (teacher.entropy_T[rows_A] * weight_A).sum()
        valid_A = batch.valid_KA[step]
        agreement.append(((best_A == teacher.best_T[rows_A]) & valid_A).sum() / valid_A.sum().clamp(min=1))
    weight = weights_KA.sum() if total_weight is None else total_weight
    return Objective(total / weight.clamp(min=1e-6), torch.stack(agreement).detach())
