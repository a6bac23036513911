"""The advantages written down plainly, over lists of floats. Tests hold `rl.algorithms.advantages` to it."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

EPSILON = 1e-6


def members(groups: Sequence[int], group: int) -> list[int]:
    return [index for index, other in enumerate(groups) if other == group]


def minus_group_mean(rewards: Sequence[float], groups: Sequence[int]) -> list[float]:
    result = []
    for reward, group in zip(rewards, groups, strict=True):
        peers = [rewards[index] for index in members(groups, group)]
        result.append(reward - sum(peers) / len(peers))
    return result


def over_group_std(rewards: Sequence[float], groups: Sequence[int]) -> list[float]:
    centred = minus_group_mean(rewards, groups)
    result = []
    for value, group in zip(centred, groups, strict=True):
        peers = [centred[index] for index in members(groups, group)]
        std = sqrt(sum(peer**2 for peer in peers) / (len(peers) - 1)) if len(peers) > 1 else 0.0
        result.append(value / (std + EPSILON))
    return result


def over_batch_std(rewards: Sequence[float], groups: Sequence[int]) -> list[float]:
    centred = minus_group_mean(rewards, groups)
    std = sqrt(sum(value**2 for value in centred) / len(centred))
    return [value / (std + EPSILON) for value in centred]


def over_token_batch_std(rewards: Sequence[float], groups: Sequence[int], lengths: Sequence[int]) -> list[float]:
    centred = minus_group_mean(rewards, groups)
    tokens = [value for value, length in zip(centred, lengths, strict=True) for _ in range(length)]
    mean = sum(tokens) / len(tokens)
    std = sqrt(sum((token - mean) ** 2 for token in tokens) / len(tokens))
    return [(value - mean) / (std + EPSILON) for value in centred]
