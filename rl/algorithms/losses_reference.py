"""The algorithms written down plainly, one by one, token by token. Tests hold `rl.algorithms.losses` to it, values and gradients.

A `Rollout` is one sequence without padding; log-probabilities are scalars, the current ones with gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rollout:
    current: Sequence[Tensor]
    proximal: Sequence[float]
    behaviour: Sequence[float]
    reference: Sequence[float]
    advantage: float

    def __len__(self) -> int:
        return len(self.current)


Weight = Callable[[Rollout, int], float]
"""What one token of a rollout counts."""


def dapo(rollouts: Sequence[Rollout], weight: Weight, low: float, high: float) -> Tensor:
    num_tokens = sum(len(rollout) for rollout in rollouts)
    total = torch.zeros((), dtype=torch.float64)
    for rollout in rollouts:
        for t in range(len(rollout)):
            total = total + weight(rollout, t) * ppo(ratio(rollout, t), rollout.advantage, low, high)
    return -total / num_tokens


def reinforce_pp(rollouts: Sequence[Rollout], weight: Weight, low: float, high: float) -> Tensor:
    """Its advantage sets it apart, not its loss."""
    return dapo(rollouts, weight, low, high)


def grpo(rollouts: Sequence[Rollout], weight: Weight, low: float, high: float, kl_weight: float = 0.0) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for rollout in rollouts:
        sequence = torch.zeros((), dtype=torch.float64)
        for t in range(len(rollout)):
            gain = ppo(ratio(rollout, t), rollout.advantage, low, high)
            away = rollout.reference[t] - rollout.current[t]
            penalty = ratio(rollout, t) * (torch.exp(away) - 1 - away)
            sequence = sequence + weight(rollout, t) * (gain - kl_weight * penalty)
        total = total + sequence / len(rollout)
    return -total / len(rollouts)


def dr_grpo(rollouts: Sequence[Rollout], weight: Weight, low: float, high: float, max_tokens: int) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for rollout in rollouts:
        for t in range(len(rollout)):
            total = total + weight(rollout, t) * ppo(ratio(rollout, t), rollout.advantage, low, high) / max_tokens
    return -total / len(rollouts)


def cispo(rollouts: Sequence[Rollout], weight: Weight, low: float, high: float) -> Tensor:
    num_tokens = sum(len(rollout) for rollout in rollouts)
    total = torch.zeros((), dtype=torch.float64)
    for rollout in rollouts:
        for t in range(len(rollout)):
            capped = min(max(float(ratio(rollout, t).detach()), 1.0 - low), 1.0 + high)
            total = total + weight(rollout, t) * capped * rollout.advantage * rollout.current[t]
    return -total / num_tokens


def gspo(rollouts: Sequence[Rollout], weight: Weight, low: float, high: float) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for rollout in rollouts:
        product = torch.ones((), dtype=torch.float64)
        for t in range(len(rollout)):
            product = product * ratio(rollout, t)
        gain = ppo(product ** (1 / len(rollout)), rollout.advantage, low, high)
        total = total + gain * sum(weight(rollout, t) for t in range(len(rollout))) / len(rollout)
    return -total / len(rollouts)


def ratio(rollout: Rollout, t: int) -> Tensor:
    return torch.exp(rollout.current[t] - rollout.proximal[t])


def ppo(r: Tensor, advantage: float, low: float, high: float) -> Tensor:
    held = min(max(r, torch.tensor(1.0 - low, dtype=r.dtype)), torch.tensor(1.0 + high, dtype=r.dtype))
    return min(r * advantage, held * advantage)


def rhos(rollout: Rollout, *, of_current: bool = False) -> list[float]:
    """pi_old / mu of each token, or pi_theta / mu."""
    policy = [float(logprob.detach()) for logprob in rollout.current] if of_current else rollout.proximal
    tokens = zip(policy, rollout.behaviour, strict=True)
    return [float(torch.exp(torch.tensor(pi - mu, dtype=torch.float64))) for pi, mu in tokens]


def geometric_mean(values: Sequence[float]) -> float:
    product = 1.0
    for value in values:
        product *= value
    return float(product ** (1 / len(values)))


def plain(rollout: Rollout, t: int) -> float:
    return 1.0


def truncated(cap: float) -> Weight:
    return lambda rollout, t: min(rhos(rollout)[t], cap)


def banded(low: float, high: float) -> Weight:
    return lambda rollout, t: rhos(rollout)[t] if low <= rhos(rollout)[t] <= high else 0.0


def in_band(inner: Weight, low: float, high: float) -> Weight:
    """Sequences whose geometric mean of rho is outside count nothing."""
    return lambda rollout, t: inner(rollout, t) if low <= geometric_mean(rhos(rollout)) <= high else 0.0


def near_policy(inner: Weight, delta: float) -> Weight:
    """Bad sequences the current policy has left behind count nothing."""

    def weight(rollout: Rollout, t: int) -> float:
        geometric = torch.tensor(geometric_mean(rhos(rollout, of_current=True)), dtype=torch.float64)
        is_left = rollout.advantage < 0 and -float(torch.log(geometric)) > delta
        return 0.0 if is_left else inner(rollout, t)

    return weight
