"""The reward model told slowly: its loss as it is written down, its gradient by moving one weight after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, log, sqrt

from rl.rewards.claims import NUM_FEATURES, Claim, Pair, features
from rl.rewards.config import RewardModelSettings
from rl.rewards.reward_model import FIRST_SQUARE

_SHIFT = 1e-5
_BIAS = NUM_FEATURES

Weights = dict[int, float]
"""By feature, the bias under NUM_FEATURES; what is absent is 0."""


def score(weights: Mapping[int, float], claim: Claim) -> float:
    return _sigmoid(_logit(weights, claim))


def loss(weights: Mapping[int, float], pairs: Sequence[Pair], gap_weight: float) -> float:
    """Nats per pair: each answer's own (VerifyRM's cross entropy) and the gap between the two (Cooper's, arXiv 2508.05613)."""
    total = 0.0
    for pair in pairs:
        right, wrong = _logit(weights, pair.right), _logit(weights, pair.wrong)
        total -= log(_sigmoid(right))
        total -= log(1.0 - _sigmoid(wrong))
        total -= gap_weight * log(_sigmoid(right - wrong))
    return total / len(pairs)


def step(weights: Weights, squares: Weights, pairs: Sequence[Pair], settings: RewardModelSettings) -> None:
    """One step of AdaGrad (Duchi et al. 2011) on the loss, in place."""
    claims = [claim for pair in pairs for claim in (pair.right, pair.wrong)]
    touched = {_BIAS} | {int(feature) for claim in claims for feature in features(claim)}
    gradient = {feature: _slope(weights, feature, pairs, settings.gap_weight) for feature in touched}
    for feature in weights:
        weights[feature] *= 1.0 - settings.decay
    for feature, slope in gradient.items():
        squares[feature] = squares.get(feature, FIRST_SQUARE) + slope**2
        moved = settings.learning_rate * slope / sqrt(squares[feature])
        weights[feature] = weights.get(feature, 0.0) - moved


def _slope(weights: Weights, feature: int, pairs: Sequence[Pair], gap_weight: float) -> float:
    above = loss(weights | {feature: weights.get(feature, 0.0) + _SHIFT}, pairs, gap_weight)
    below = loss(weights | {feature: weights.get(feature, 0.0) - _SHIFT}, pairs, gap_weight)
    return (above - below) / (2.0 * _SHIFT)


def _logit(weights: Mapping[int, float], claim: Claim) -> float:
    own = [int(feature) for feature in features(claim)]
    return sum(weights.get(feature, 0.0) for feature in own) / sqrt(len(own)) + weights.get(_BIAS, 0.0)


def _sigmoid(z: float) -> float:
    return 1.0 / (1.0 + exp(-z))
