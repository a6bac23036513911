"""The shares written down plainly, sequence by sequence. Tests hold `rl.algorithms.shares` to it.

`lengths` counts the tokens of each sequence, `rollouts` names the rollout each is of; what is returned is the share of one token of
each sequence, 0 where it has none.
"""

from __future__ import annotations

from collections.abc import Sequence


def rollout_tokens(lengths: Sequence[int], rollouts: Sequence[int]) -> dict[int, int]:
    """Of each rollout that has any."""
    found: dict[int, int] = {}
    for length, rollout in zip(lengths, rollouts, strict=True):
        if length > 0:
            found[rollout] = found.get(rollout, 0) + length
    return found


def token_share(lengths: Sequence[int], rollouts: Sequence[int]) -> list[float]:
    num_tokens = sum(rollout_tokens(lengths, rollouts).values())
    return [1 / num_tokens if length > 0 else 0.0 for length in lengths]


def sequence_share(lengths: Sequence[int], rollouts: Sequence[int]) -> list[float]:
    tokens = rollout_tokens(lengths, rollouts)
    result = []
    for length, rollout in zip(lengths, rollouts, strict=True):
        result.append(1 / len(tokens) / tokens[rollout] if length > 0 else 0.0)
    return result


def constant_share(lengths: Sequence[int], rollouts: Sequence[int], max_tokens: int) -> list[float]:
    tokens = rollout_tokens(lengths, rollouts)
    return [1 / len(tokens) / max_tokens if length > 0 else 0.0 for length in lengths]
