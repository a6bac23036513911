"""What the target predicted at each captured row, recomputed from its final hidden state through the frozen head.

The soft cross-entropy to the target needs the target's distribution p only through the head row it expects: the loss is
`logsumexp(z) - h . sum_u p_u w_u`, with z the draft's logits, h its output and w_u its head rows. So `expected` [T, D]
stands in for p [T, U], is made once a request, and serves every depth and every pass.

Shape letters: T rows, C rows of one chunk, D hidden, U draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from drafter.head import Head

_CHUNK_ROWS = 256


@dataclass(frozen=True)
class TeacherRows:
    """expected_TD: expected head row under the target renormalised on the draft vocabulary, float32; entropy_T of that
    distribution, nats; best_T: draft id of its most likely token; vocabulary_sha256: of the one they were made for;
    temperature: by which the target's logits were divided."""

    expected_TD: Tensor
    entropy_T: Tensor
    best_T: Tensor
    vocabulary_sha256: str
    temperature: float


def teach(hidden_TD: Tensor, head: Head, *, temperature: float = 1.0) -> TeacherRows:
    """TeacherRows of final hidden rows [T, D]; temperature sharpens (below 1) or flattens what the target predicts."""
    expected, entropies, best = [], [], []
    for chunk_CD in hidden_TD.split(_CHUNK_ROWS):
        log_p_CU = target_logits(chunk_CD, head, temperature).log_softmax(-1)
        p_CU = log_p_CU.exp()
        entropies.append(-(p_CU * log_p_CU).sum(-1))
        expected.append(wide(p_CU.to(head.weight_UD.dtype) @ head.weight_UD))
        best.append(p_CU.argmax(-1))
    return TeacherRows(torch.cat(expected), torch.cat(entropies), torch.cat(best), head.vocabulary.sha256, temperature)


def target_logits(hidden_CD: Tensor, head: Head, temperature: float) -> Tensor:
    """The target's logits on the draft vocabulary [C, U], over the temperature."""
    return wide(functional.linear(hidden_CD.to(head.target_UD), head.target_UD)) / temperature


def wide(tensor: Tensor) -> Tensor:
    """In the precision of sums: float32, or float64 where the products are."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
