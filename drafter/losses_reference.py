"""The losses written down plainly, position by position, over whole distributions. Tests hold `drafter.losses` and
`drafter.objectives` to it.

A `Position` is one anchor at one depth. Everything here is a function of a list of them, by automatic differentiation.

Shape letters: D hidden, U draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Position:
    """p and q: the target's and the draft's distribution on the draft vocabulary, [U]. verdict: `accepted`, `rejected` or
    `none`; proposed: draft id of the proposal, None where the draft vocabulary lacks it; weight: credit; step: names the verify
    step, whose judged positions are those with the same name."""

    p_U: Tensor
    q_U: Tensor
    weight: float
    verdict: str
    proposed: int | None
    depth: int
    step: int


def distribution(hidden_D: Tensor, head_UD: Tensor, temperature: float = 1.0) -> Tensor:
    return torch.softmax(head_UD @ hidden_D / temperature, dim=0)


def kl(p_U: Tensor, q_U: Tensor) -> Tensor:
    """sum_u p_u (log p_u - log q_u), nats; 0 log 0 is 0."""
    return sum((p * (p.log() - q.log()) for p, q in zip(p_U, q_U, strict=True) if p > 0), start=q_U.new_zeros(()))


def overlap(p_U: Tensor, q_U: Tensor) -> Tensor:
    """sum_u min(p_u, q_u)."""
    return sum((min(p, q) for p, q in zip(p_U, q_U, strict=True)), start=q_U.new_zeros(()))


def cut(p_U: Tensor, count: int) -> Tensor:
    """Only the `count` likeliest tokens, renormalised; 0 keeps all."""
    if count == 0:
        return p_U
    kept = sorted(range(len(p_U)), key=lambda token: -float(p_U[token]))[:count]
    return torch.stack([p if token in kept else p * 0 for token, p in enumerate(p_U)]) / sum(p_U[token] for token in kept)


def weighted_mean(positions: Sequence[Position], loss: Callable[[Position], Tensor]) -> Tensor:
    """0 where there is no weight."""
    total = sum(position.weight for position in positions)
    if total == 0:
        return torch.zeros((), dtype=torch.float64)
    return sum((loss(position) * position.weight for position in positions), start=torch.zeros((), dtype=torch.float64)) / total


def kl_loss(positions: Sequence[Position]) -> Tensor:
    return weighted_mean(positions, lambda at: kl(at.p_U, at.q_U))


def kl_ce_loss(positions: Sequence[Position], hard_weight: float) -> Tensor:
    hard = weighted_mean(positions, lambda at: -at.q_U[at.p_U.argmax()].log())
    return (1 - hard_weight) * kl_loss(positions) + hard_weight * hard


def aurora_loss(positions: Sequence[Position], lambda_discard: float, discard_top_k: int) -> Tensor:
    accepted = [at for at in positions if at.verdict != "rejected"]
    discarded = [at for at in positions if at.verdict == "rejected"]
    discard = weighted_mean(discarded, lambda at: kl(cut(at.p_U, discard_top_k), at.q_U))
    return kl_loss(accepted) + lambda_discard * discard


def reinforce_loss(positions: Sequence[Position], kl_weight: float) -> Tensor:
    """With a baseline that is the mean of these positions alone."""
    judged = [at for at in positions if at.verdict != "none" and at.proposed is not None]
    reward = {"accepted": 1.0, "rejected": -1.0}

    def follows(at: Position) -> list[Position]:
        return [other for other in judged if other.step == at.step and other.depth > at.depth]

    def value(depth: int) -> float:
        returns = [
            reward[at.verdict] + sum(reward[later.verdict] for later in follows(at)) for at in judged if at.depth == depth
        ]
        return sum(returns) / len(returns)

    def loss(at: Position) -> Tensor:
        opened = value(at.depth + 1) if any(later.depth == at.depth + 1 for later in follows(at)) else 0.0
        advantage = reward[at.verdict] + opened - value(at.depth)
        return -advantage * at.q_U[at.proposed]

    return weighted_mean(judged, loss) + kl_weight * kl_loss(positions)


def tv_loss(positions: Sequence[Position]) -> Tensor:
    return weighted_mean(positions, lambda at: 1 - overlap(at.p_U, at.q_U))


def lk_loss(positions: Sequence[Position], lk_decay: float) -> Tensor:
    def loss(at: Position) -> Tensor:
        alpha = overlap(at.p_U, at.q_U)
        blend = (-lk_decay * alpha.detach()).exp()
        return blend * kl(at.p_U, at.q_U) + (1 - blend) * (1 - alpha)

    return weighted_mean(positions, loss)
