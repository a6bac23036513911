"""Does reward follow length? The sign that answers are being made long, or short, for its sake.

Prompts differ in both, so only answers to one prompt are compared (correlation of deviations from the group's mean). Right answers
may well need more words; what is left among answers to one prompt on which the rule says the same is no consequence of being right.
A forked rollout is one observation: its trajectories share one reward, and its length is that of all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from math import atanh, erfc, inf, sqrt

import numpy as np
from msgspec import Struct

from rl.trajectory import Group, Trajectory, num_output_tokens

_MAX_P_VALUE = 0.01


class LengthCorrelation(Struct, frozen=True, kw_only=True):
    num_rollouts: int
    """In strata that have two or more and differ in both."""
    correlation: float
    """Pearson's, within strata; 0 where nothing differs."""
    p_value: float
    """That one as far from 0 comes about by chance (Fisher's z)."""


class LengthReport(Struct, frozen=True, kw_only=True, tag="length_report"):
    """Of the groups of a few steps."""

    among_group: LengthCorrelation
    among_equally_right: LengthCorrelation
    """Among answers to one prompt with the same verdict of the rule."""
    alarms: tuple[str, ...]


def length_report(groups: Sequence[Group], rule: str, limit: float) -> LengthReport:
    """rule: name of the reward part that says whether an answer is right. limit: largest correlation without an alarm."""
    rollouts = [rollout for group in groups for rollout in group.scored_rollouts]
    overall = _correlation((rollout[0].group_id, rollout) for rollout in rollouts)
    given_rule = _correlation(((rollout[0].group_id, _verdict(rollout[0], rule)), rollout) for rollout in rollouts)
    found = []
    if _is_alarming(given_rule, limit):
        found.append(
            f"answers that are equally right earn more the {_direction(given_rule)} they are (correlation "
            f"{given_rule.correlation:.2f} over {given_rule.num_rollouts}): a reward part or the reward model follows length; "
            "lower its weight, or let it count only where the answer is right (only_if)"
        )
    elif _is_alarming(overall, limit):
        found.append(
            f"{_direction(overall)} answers earn more (correlation {overall.correlation:.2f} over {overall.num_rollouts}), because "
            "they are right more often; if it stays while held-out pass rate does not rise, set overlong_buffer_tokens"
        )
    return LengthReport(among_group=overall, among_equally_right=given_rule, alarms=tuple(found))


def _correlation(stratified: Iterable[tuple[Hashable, Sequence[Trajectory]]]) -> LengthCorrelation:
    strata: dict[Hashable, list[tuple[int, float]]] = defaultdict(list)
    for stratum, rollout in stratified:
        strata[stratum].append((num_output_tokens(rollout), rollout[0].reward))
    lengths: list[float] = []
    rewards: list[float] = []
    num_strata = 0
    for members in strata.values():
        if any(len(set(values)) < 2 for values in zip(*members, strict=True)):
            continue
        deviations = np.asarray(members, np.float64) - np.mean(members, axis=0)
        lengths.extend(deviations[:, 0])
        rewards.extend(deviations[:, 1])
        num_strata += 1
    if not lengths:
        return LengthCorrelation(num_rollouts=0, correlation=0.0, p_value=1.0)
    product = float(np.dot(lengths, rewards) / sqrt(np.dot(lengths, lengths) * np.dot(rewards, rewards)))
    correlation = min(1.0, max(-1.0, product))
    return LengthCorrelation(
        num_rollouts=len(lengths), correlation=correlation, p_value=_p_value(correlation, len(lengths) - num_strata)
    )


def _p_value(correlation: float, freedom: int) -> float:
    """Two-sided. freedom: observations less the means that were taken away; Fisher's z has variance 1 / (freedom - 2)."""
    if freedom <= 2:
        return 1.0
    z = inf if abs(correlation) == 1.0 else atanh(abs(correlation)) * sqrt(freedom - 2)
    return erfc(z / sqrt(2.0))


def _is_alarming(found: LengthCorrelation, limit: float) -> bool:
    return abs(found.correlation) > limit and found.p_value < _MAX_P_VALUE


def _direction(found: LengthCorrelation) -> str:
    return "longer" if found.correlation > 0 else "shorter"


def _verdict(trajectory: Trajectory, rule: str) -> float | None:
    return next((part.value for part in trajectory.reward_parts if part.name == rule), None)
