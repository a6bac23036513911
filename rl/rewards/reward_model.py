"""The reward model: a logistic head over the features of a claim.

    loss = - log s(x+) - log (1 - s(x-)) - gap_weight log sigmoid(z(x+) - z(x-))        s = sigmoid(z),  z = (w . x) / sqrt|x| + b

over pairs of a right answer and its corruption (the contrastive update of Cooper, arXiv 2508.05613). AdaGrad sets the step by
feature, so that a rare turn of phrase is learned as fast as a common one. Features are sets: x is 1 on them. Told plainly in
`reward_model_reference.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

from rl.rewards.claims import NUM_FEATURES, Claim, Features, Pair, features
from rl.rewards.config import RewardModelSettings
from wire.errors import TrainerError

Floats = npt.NDArray[np.float64]
FIRST_SQUARE = 1e-4
"""What AdaGrad's squares begin with. From 0, a gradient that is nothing but rounding would move a weight as far as any other: features that
a right answer shares with its corruption have such gradients."""


class RewardModel:
    """Scores 0.5 whatever it is shown, before its first update. Deterministic."""

    def __init__(self, settings: RewardModelSettings) -> None:
        self._settings = settings
        self._weights = np.zeros(NUM_FEATURES + 1)
        """The bias last."""
        self._squares = np.full(NUM_FEATURES + 1, FIRST_SQUARE)
        """AdaGrad's, of each weight's gradients."""

    def score(self, claim: Claim) -> float:
        """In [0, 1]."""
        return float(_sigmoid(self._logit(features(claim))))

    def update(self, pairs: Sequence[Pair]) -> float:
        """One step; the mean loss before it, nats per pair. No pairs: nothing happens, 0."""
        if not pairs:
            return 0.0
        gradient = np.zeros_like(self._weights)
        loss = 0.0
        for pair in pairs:
            loss += self._add_gradient(features(pair.right), features(pair.wrong), gradient)
        gradient /= len(pairs)
        self._squares += gradient**2
        self._weights *= 1.0 - self._settings.decay
        self._weights -= self._settings.learning_rate * gradient / np.sqrt(self._squares)
        return loss / len(pairs)

    def state(self) -> bytes:
        """For a checkpoint; `load` goes on from it exactly."""
        return save({"weights": self._weights, "squares": self._squares})

    def load(self, state: bytes) -> None:
        """Raises TrainerError where it is none of a reward model of this size, and has changed nothing then."""
        try:
            tensors = load(state)
            weights, squares = tensors["weights"], tensors["squares"]
        except (SafetensorError, KeyError) as error:
            raise TrainerError(
                f"{len(state)} bytes are no state of a reward model: {error}; go on without [rl.reward_model]"
            ) from error
        for name, tensor in (("weights", weights), ("squares", squares)):
            if tensor.shape != self._weights.shape or not np.isfinite(tensor).all():
                raise TrainerError(
                    f"{name} of the reward model have shape {tensor.shape}, finite ones of {self._weights.shape} are needed; go on without "
                    "[rl.reward_model]"
                )
        self._weights, self._squares = weights.copy(), squares.copy()

    def _logit(self, indices: Features) -> float:
        return float(self._weights[indices].sum() / np.sqrt(len(indices)) + self._weights[-1])

    def _add_gradient(self, right: Features, wrong: Features, gradient: Floats) -> float:
        right_z, wrong_z = self._logit(right), self._logit(wrong)
        gap = self._settings.gap_weight
        pull = gap * _sigmoid(wrong_z - right_z)
        for indices, slope in ((right, _sigmoid(right_z) - 1.0 - pull), (wrong, _sigmoid(wrong_z) + pull)):
            gradient[indices] += slope / np.sqrt(len(indices))
            gradient[-1] += slope
        return float(np.logaddexp(0, -right_z) + np.logaddexp(0, wrong_z) + gap * np.logaddexp(0, wrong_z - right_z))


def _sigmoid(z: float) -> float:
    return float(np.exp(-np.logaddexp(0.0, -z)))
