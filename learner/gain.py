"""Gain of one draft over another on the same requests, and how sure of it one can be.

Both drafts are scored on the same requests, so the bootstrap is paired: it resamples prompts, and each keeps its pair of scores.
The same prompt asked again is no new evidence, so all its requests are drawn together.

The bootstrap gives the standard error, Student's t the tail. A percentile of resamples would not do: with n prompts it takes
"all changes have one sign" for proof at every level, and it resolves none below one in the number of resamples, while looks
that are repeated hundreds of times are held to one in ten thousand (`learner/looks.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import expm1, sqrt
from statistics import NormalDist

import numpy as np

from learner.evaluate import Score

_SEED = 0


@dataclass(frozen=True)
class Gain:
    """Difference in simulated AL, over all anchors of the requests."""

    mean: float
    std_error: float
    num_freedom: float
    """Degrees of freedom of the standard error."""
    num_requests: int

    def low(self, level: float) -> float:
        """What the true gain is below with probability `level` at most (one-sided)."""
        return self.mean - student_quantile(level, self.num_freedom) * self.std_error

    def high(self, level: float) -> float:
        """What the true gain is above with probability `level` at most (one-sided)."""
        return self.mean + student_quantile(level, self.num_freedom) * self.std_error


def paired_gain(candidate: Mapping[str, Score], incumbent: Mapping[str, Score], *, num_resamples: int) -> Gain:
    """Gain of candidate over incumbent on the requests both were scored on; all zero with fewer than two prompts.

    The gain is a ratio (change of tokens over anchors), its standard error that of the bootstrap, times sqrt(n / (n - 1)) for
    n prompts (Efron & Tibshirani 1993, ch. 6). Prompts of unequal length are worth (sum a)^2 / sum a^2 equal ones of a anchors
    (Kish 1965), one less is the degrees of freedom: a single long request cannot pass for many.
    """
    changes, anchors = _by_prompt(candidate, incumbent)
    num_requests, num_prompts = len(candidate.keys() & incumbent.keys()), len(changes)
    if num_prompts < 2:
        return Gain(0.0, 0.0, 1.0, num_requests)
    picks = np.random.default_rng(_SEED).integers(0, num_prompts, size=(num_resamples, num_prompts))
    resampled = changes[picks].sum(axis=1) / anchors[picks].sum(axis=1)
    num_effective = anchors.sum() ** 2 / (anchors**2).sum()
    return Gain(
        mean=float(changes.sum() / anchors.sum()),
        std_error=float(resampled.std()) * sqrt(num_prompts / (num_prompts - 1)),
        num_freedom=max(float(num_effective) - 1.0, 1.0),
        num_requests=num_requests,
    )


def student_quantile(level: float, num_freedom: float) -> float:
    """The value Student's t exceeds with probability `level`, after Wallace (Ann. Math. Stat. 30, 1959, eq. 1.3).

    Errs on the careful side: from 3 degrees of freedom on, and for levels of 1e-4 and more, the true probability is between
    half of `level` and `level`.
    """
    normal = NormalDist().inv_cdf(1.0 - level) * (8.0 * num_freedom + 3.0) / (8.0 * num_freedom + 1.0)
    return sqrt(num_freedom * expm1(normal**2 / num_freedom))


def _by_prompt(candidate: Mapping[str, Score], incumbent: Mapping[str, Score]) -> tuple[np.ndarray, np.ndarray]:
    """Change of tokens, and anchors, of each prompt."""
    changes: defaultdict[str, float] = defaultdict(float)
    anchors: defaultdict[str, float] = defaultdict(float)
    for key in sorted(candidate.keys() & incumbent.keys()):
        score = candidate[key]
        changes[score.prompt_key] += score.total_length - incumbent[key].total_length
        anchors[score.prompt_key] += score.num_anchors
    return np.array(list(changes.values())), np.array(list(anchors.values()))
