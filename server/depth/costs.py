"""StepCosts: how long a step takes at each K, relative to K = 0, in one bucket of batch sizes. Pure.

Machines are faster and slower by the minute, so absolute times of two K measured at different times say little. What is
observed is the ratio of two K that ran one right after the other; logarithms of ratios make a Gaussian of K + 1 numbers. Before
anything is measured it is the linear model `1 + slope * K` with an uncertain slope, which interpolates where a K was not tried.
"""

from __future__ import annotations

from math import log1p, sqrt

from server.depth.estimate import Estimate

SLOPE = 0.15
"""Assumed share of a plain step that one more proposal adds."""
SLOPE_DEVIATION = 0.12
BEND_DEVIATION = 0.05
"""How far the logarithm at each K may lie off the line."""
OCTAVE_DEVIATION = 0.1
"""How much the slope may change where the batch doubles."""
DRIFT_PER_S = 0.05**2 / 600
"""Variance of the logarithm at each K > 0 that time adds: contexts grow, machines change."""


class StepCosts:
    """Mean and covariance of log(step time at K / step time at 0)."""

    def __init__(self, max_depth: int) -> None:
        depths = range(max_depth + 1)
        self.mean = [log1p(SLOPE * depth) for depth in depths]
        self._slope = [depth / (1.0 + SLOPE * depth) for depth in depths]
        """Of each mean by SLOPE."""
        bends = [0.0] + [BEND_DEVIATION**2] * max_depth
        self.covariance = [[self._along_slope(SLOPE_DEVIATION, i, j) + bends[i] * (i == j) for j in depths] for i in depths]
        self._most = [self.covariance[depth][depth] for depth in depths]
        """Variance that drift does not raise above."""
        self.compared: set[int] = set()
        """K that took part in a comparison in this bucket."""

    def log_ratio(self, depth: int, other: int, *, num_octaves: float = 0.0) -> Estimate:
        """Of the step times at two K, here or in a bucket with 2 ** num_octaves times as many requests, or as few.

        More proposals never take less time, whatever noise says.
        """
        mean = self.mean[depth] - self.mean[other]
        mean = max(mean, 0.0) if depth > other else min(mean, 0.0)
        covariance = self.covariance
        variance = max(covariance[depth][depth] + covariance[other][other] - 2.0 * covariance[depth][other], 0.0)
        elsewhere = OCTAVE_DEVIATION * num_octaves * (self._slope[depth] - self._slope[other])
        return Estimate(mean, sqrt(variance + elsewhere**2))

    def observe(self, depth: int, other: int, log_ratio: float, noise_variance: float) -> float:
        """Take in one measured ratio: a Kalman update. Returns the part of its squared surprise that is noise."""
        gains = [row[depth] - row[other] for row in self.covariance]
        known_variance = gains[depth] - gains[other]
        surprise = log_ratio - (self.mean[depth] - self.mean[other])
        total_variance = known_variance + noise_variance
        for i, gain in enumerate(gains):
            self.mean[i] += gain / total_variance * surprise
            for j, other_gain in enumerate(gains):
                self.covariance[i][j] -= gain * other_gain / total_variance
        self.compared |= {depth, other}
        return surprise**2 * noise_variance / total_variance

    def age(self, duration_s: float) -> None:
        """Let the knowledge grow old."""
        for depth in range(1, len(self.mean)):
            spare = max(self._most[depth] - self.covariance[depth][depth], 0.0)
            self.covariance[depth][depth] += min(DRIFT_PER_S * duration_s, spare)

    def borrowed(self, num_octaves: float) -> StepCosts:
        """What this says of such another bucket, to be improved by what is measured there."""
        other = StepCosts(len(self.mean) - 1)
        other.mean = list(self.mean)
        other.covariance = [
            [value + self._along_slope(OCTAVE_DEVIATION * num_octaves, i, j) for j, value in enumerate(row)]
            for i, row in enumerate(self.covariance)
        ]
        return other

    def _along_slope(self, deviation: float, depth: int, other: int) -> float:
        """Covariance that an uncertain slope gives two K."""
        return deviation**2 * self._slope[depth] * self._slope[other]
