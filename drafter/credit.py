"""Credit: how much each anchor and depth counts, by what verification said about the draft's proposals there.

Shape letters: T rows, A anchors, K depths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


@dataclass(frozen=True)
class Verdicts:
    """What verification said of the draft's proposals, by depth and anchor.

    proposed_KA [K, A]: target ids, -1 where nothing was proposed; accepted_KA and rejected_KA [K, A] bool, both false where a
    depth was not judged: it lies beyond a rejection, or nothing was proposed; verified_A [A] bool: a verify step began here.
    """

    proposed_KA: Tensor
    accepted_KA: Tensor
    rejected_KA: Tensor
    verified_A: Tensor

    def to(self, device: torch.device) -> Verdicts:
        """The same verdicts where losses are computed."""
        return Verdicts(
            proposed_KA=self.proposed_KA.to(device),
            accepted_KA=self.accepted_KA.to(device),
            rejected_KA=self.rejected_KA.to(device),
            verified_A=self.verified_A.to(device),
        )


def verdicts(outcomes: Mapping[int, Outcome], positions_A: Tensor, depth: int) -> Verdicts:
    """Verdicts on anchors at the given positions; `outcomes` is keyed by anchor position."""
    shape = (depth, positions_A.numel())
    found = Verdicts(
        proposed_KA=torch.full(shape, -1, dtype=torch.int64),
        accepted_KA=torch.zeros(shape, dtype=torch.bool),
        rejected_KA=torch.zeros(shape, dtype=torch.bool),
        verified_A=torch.zeros(positions_A.numel(), dtype=torch.bool),
    )
    for column, position in enumerate(positions_A.tolist()):
        outcome = outcomes.get(position)
        if outcome is None or not outcome.proposed_ids:
            continue
        proposed = outcome.proposed_ids[:depth]
        found.verified_A[column] = True
        found.proposed_KA[: len(proposed), column] = torch.tensor(proposed)
        found.accepted_KA[: outcome.num_accepted, column] = True
        if outcome.num_accepted < len(proposed):
            found.rejected_KA[outcome.num_accepted, column] = True
    return found


def batch_verdicts(batch: Batch, outcomes: Sequence[Mapping[int, Outcome]], depth: int) -> Verdicts:
    """Verdicts on the anchors of a packed batch. One mapping for each packed request."""
    parts = []
    for bounds, by_position in zip(batch.bounds, outcomes, strict=True):
        anchors = batch.anchors_A[bounds.anchor_start : bounds.anchor_end]
        parts.append(verdicts(by_position, batch.positions_T[anchors], depth))
    return Verdicts(
        proposed_KA=torch.cat([part.proposed_KA for part in parts], dim=1),
        accepted_KA=torch.cat([part.accepted_KA for part in parts], dim=1),
        rejected_KA=torch.cat([part.rejected_KA for part in parts], dim=1),
        verified_A=torch.cat([part.verified_A for part in parts]),
    )


def credit(found: Verdicts, weights: CreditWeights) -> Tensor:
    """Weights [K, A] by verdict."""
    depth = found.accepted_KA.shape[0]
    decay_K = weights.depth_decay ** torch.arange(depth, dtype=torch.float32)
    credit_KA = torch.where(found.verified_A, weights.beyond, weights.unverified).float().repeat(depth, 1)
    credit_KA[found.accepted_KA] = weights.accepted
    credit_KA[found.rejected_KA] = weights.rejected
    return credit_KA * decay_K[:, None]
