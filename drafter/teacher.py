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
    distribution, nats; best_T: draft id of its most likely token; vocabulary_sha256: of the one they were made for."""

    expected_TD: Tensor
    entropy_T: Tensor
    best_T: Tensor
    vocabulary_sha256: str


def teach(hidden_TD: Tensor, head: Head, *, hard_weight: float = 0.0, temperature: float = 1.0) -> TeacherRows:
    """TeacherRows of final hidden rows [T, D].

    hard_weight mixes the target distribution with its own most likely token, which is what greedy drafting is paid for;
    temperature sharpens (below 1) or flattens it.
    """
    expected, entropies, best = [], [], []
    for chunk_CD in hidden_TD.split(_CHUNK_ROWS):
        logits_CU = functional.linear(chunk_CD.to(head.target_UD), head.target_UD).float() / temperature
        log_p_CU = logits_CU.log_softmax(-1)
        p_CU = log_p_CU.exp()
        top_C = p_CU.argmax(-1)
        entropies.append(-(p_CU * log_p_CU).sum(-1))
        mean_CD = (p_CU.to(head.weight_UD.dtype) @ head.weight_UD).float()
        expected.append((1 - hard_weight) * mean_CD + hard_weight * head.weight_UD[top_C].float())
        best.append(top_C)
    return TeacherRows(torch.cat(expected), torch.cat(entropies), torch.cat(best), head.vocabulary.sha256)
