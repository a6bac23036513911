"""Verify steps as requests make them: those of one request are alike."""

from __future__ import annotations

import numpy as np

from server.tally import Tally


def tally(num_steps: int, *accepted: int) -> Tally:
    return Tally(num_steps, (num_steps,) * len(accepted), accepted)


class Requests:
    """Verify steps of three requests at a time, each of which has an acceptance of its own."""

    def __init__(self, rng: np.random.Generator, acceptance: float) -> None:
        self._rng, self._acceptance = rng, acceptance
        self._left: list[tuple[int, float]] = []

    def second(self) -> Tally:
        self._left = [one for one in self._left if one[0] > 0]
        while len(self._left) < 3:
            self._left.append(
                (int(self._rng.integers(20, 100)), float(np.clip(self._rng.normal(self._acceptance, 0.12), 0, 1)))
            )
        accepted = np.zeros(3, dtype=int)
        for _, acceptance in self._left:
            survivors = 8
            for depth in range(3):
                survivors = self._rng.binomial(survivors, acceptance)
                accepted[depth] += survivors
        self._left = [(left - 8, acceptance) for left, acceptance in self._left]
        return tally(24, *accepted.tolist())
