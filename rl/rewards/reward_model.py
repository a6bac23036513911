"""The reward model: a logistic head over the features of a claim.

    loss = - log s(x+) - log (1 - s(x-)) - gap_weight log sigmoid(z(x+) - z(x-))        s = sigmoid(z),  z = (w . x) / sqrt|x| + b

over pairs of a right answer and its corruption (the contrastive update of Cooper, arXiv 2508.05613). AdaGrad sets the step by
feature, so that a rare turn of phrase is learned as fast as a common one. Features are sets: x is 1 on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from rl.rewards.claims import NUM_FEATURES, Claim, Features, features
from rl.rewards.config import RewardModelSettings
from wire.errors import TrainerError

Floats = npt.NDArray[np.float64]
_EPSILON = 1e-8


class RewardModel:
    """Scores 0.5 whatever it is shown, before its first update. Deterministic."""

    def __init__(self, settings: RewardModelSettings) -> None:
        self._settings = settings
        self._weights = np.zeros(NUM_FEATURES + 1)
        """The bias last."""
        self._squares = np.zeros(NUM_FEATURES + 1)

    def score(self, claim: Claim) -> float:
        """In (0, 1)."""
        return float(_sigmoid(self._logit(features(claim))))

    def update(self, pairs: Sequence[tuple[Claim, Claim]]) -> float:
        """One step on (right, wrong) pairs; the mean loss before it, nats per pair. No pairs: nothing happens, 0."""
        if not pairs:
            return 0.0
        gradient = np.zeros_like(self._weights)
        loss = 0.0
        for right, wrong in pairs:
            loss += self._add_gradient(features(right), features(wrong), gradient)
        gradient /= len(pairs)
        self._squares += gradient**2
        self._weights *= 1.0 - self._settings.decay
        self._weights -= self._settings.learning_rate * gradient / (np.sqrt(self._squares) + _EPSILON)
        return loss / len(pairs)

    def tensors(self) -> dict[str, Floats]:
        """All that `load` needs."""
        return {"weights": self._weights.copy(), "squares": self._squares.copy()}

    def load(self, tensors: Mapping[str, Floats]) -> None:
        """Raises TrainerError where they are not a reward model's of this size."""
        for name in ("weights", "squares"):
            shape = tensors[name].shape if name in tensors else None
            if shape != self._weights.shape or not np.isfinite(tensors[name]).all():
                raise TrainerError(
                    f"{name} of the reward model have shape {shape}, finite ones of {self._weights.shape} are needed; begin it anew"
                )
        self._weights, self._squares = tensors["weights"].copy(), tensors["squares"].copy()

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
