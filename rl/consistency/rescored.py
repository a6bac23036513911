"""Rollout tokens with the probability the engine drew them with and the one the trainer gives them.

Shape letters: T tokens, of all sequences one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from rl.trajectory import Trajectory
from wire.errors import RolloutError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Rescored:
    behaviour_T: Floats
    """Natural log-probabilities, as all here."""
    trainer_T: Floats
    version_T: Ints
    """Of the target that drew the token."""
    sequence_T: Ints
    """Numbers the token's sequence; tokens of one stand together."""

    def __post_init__(self) -> None:
        shapes = {self.behaviour_T.shape, self.trainer_T.shape, self.version_T.shape, self.sequence_T.shape}
        if len(shapes) != 1 or self.behaviour_T.ndim != 1:
            raise RolloutError(f"rescored tokens have shapes {sorted(shapes)}; each token has one entry in every array")
        for name in ("behaviour_T", "trainer_T"):
            bad = np.flatnonzero(~np.isfinite(getattr(self, name)))
            if bad.size:
                raise RolloutError(
                    f"{name} is {getattr(self, name)[bad[0]]} at token {bad[0]} ({bad.size} such tokens); look at this rollout's "
                    "weights: no divergence can be told from it"
                )

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory], trainer_logprobs: Sequence[Sequence[float]]) -> Self:
        """trainer_logprobs: for each trajectory those of its output tokens, over all turns. Raises RolloutError."""
        if len(trajectories) != len(trainer_logprobs):
            raise RolloutError(
                f"{len(trajectories)} trajectories and log-probabilities of {len(trainer_logprobs)}; score each once"
            )
        for trajectory, logprobs in zip(trajectories, trainer_logprobs, strict=True):
            if trajectory.num_output_tokens != len(logprobs):
                raise RolloutError(
                    f"sample {trajectory.sample_index} of group {trajectory.group_id} has {trajectory.num_output_tokens} output "
                    f"tokens and {len(logprobs)} trainer log-probabilities; score output tokens only, each once"
                )
        behaviour = [logprob for each in trajectories for turn in each.turns for logprob in turn.behaviour_logprobs]
        versions = [version for trajectory in trajectories for version in trajectory.token_versions]
        sequences = [index for index, trajectory in enumerate(trajectories) for _ in range(trajectory.num_output_tokens)]
        trainer = [logprob for logprobs in trainer_logprobs for logprob in logprobs]
        return cls(
            np.asarray(behaviour, np.float64),
            np.asarray(trainer, np.float64),
            np.asarray(versions, np.int64),
            np.asarray(sequences, np.int64),
        )

    def of_version(self, target_version: int) -> Rescored:
        """Only the tokens of one version: where the trainer has the same weights, what is left is arithmetic."""
        kept_T = self.version_T == target_version
        return Rescored(self.behaviour_T[kept_T], self.trainer_T[kept_T], self.version_T[kept_T], self.sequence_T[kept_T])

    def abs_means(self) -> Floats:
        """Mean |d log p| of each sequence, in order."""
        _, index_T = np.unique(self.sequence_T, return_inverse=True)
        totals = np.bincount(index_T, np.abs(self.trainer_T - self.behaviour_T))
        return np.asarray(totals / np.bincount(index_T), np.float64)
