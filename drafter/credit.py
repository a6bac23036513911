"""Credit: how much each anchor and depth counts, by what verification said about the draft's proposals there.

Shape letters: T rows, A anchors, K depths.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from drafter.batch import Batch


@dataclass(frozen=True)
class Outcome:
    """One verify step: proposals made from an anchor, and how many of them were accepted (a prefix)."""

    proposed_ids: tuple[int, ...]
    num_accepted: int
    draft_version: int


@dataclass(frozen=True)
class CreditWeights:
    """Weight of a depth whose proposal was accepted, of the one that was rejected, and of depths beyond it.

    `unverified` weighs anchors from which the engine proposed nothing (they lay inside an accepted run). `depth_decay`
    multiplies depth s by its s-th power.
    """

    accepted: float = 1.0
    rejected: float = 1.0
    beyond: float = 1.0
    unverified: float = 1.0
    depth_decay: float = 0.8


def credit(outcomes: Mapping[int, Outcome], positions_A: Tensor, depth: int, weights: CreditWeights) -> Tensor:
    """Weights [K, A] for anchors at the given positions; `outcomes` is keyed by anchor position."""
    decay_K = weights.depth_decay ** torch.arange(depth, dtype=torch.float32)
    credit_KA = torch.full((depth, positions_A.numel()), weights.unverified)
    for column, position in enumerate(positions_A.tolist()):
        outcome = outcomes.get(position)
        if outcome is None or not outcome.proposed_ids:
            continue
        accepted = outcome.num_accepted
        credit_KA[:, column] = weights.beyond
        credit_KA[:accepted, column] = weights.accepted
        if accepted < min(len(outcome.proposed_ids), depth):
            credit_KA[accepted, column] = weights.rejected
    return credit_KA * decay_K[:, None]


def batch_credit(batch: Batch, outcomes: list[Mapping[int, Outcome]], depth: int, weights: CreditWeights) -> Tensor:
    """Weights [K, A] of a packed batch, 0 where an anchor is not valid at a depth. One mapping for each packed request."""
    parts = []
    for bounds, by_position in zip(batch.bounds, outcomes, strict=True):
        anchors = batch.anchors_A[bounds.anchor_start : bounds.anchor_end]
        parts.append(credit(by_position, batch.positions_T[anchors], depth, weights))
    return torch.cat(parts, dim=1) * batch.valid_KA[:depth]
