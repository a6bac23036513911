"""Gain of one draft over another on the same requests, and how sure of it one can be.

Both drafts are scored on the same requests, so the bootstrap is paired: it resamples prompts, and each keeps its pair of scores.
The same prompt asked again is no new evidence, so all its requests are drawn together.

The bootstrap gives the standard error, Student's t the tail. A percentile of resamples would not do: with n prompts it takes
"all changes have one sign" for proof at every level, and it resolves none below one in the number of resamples, while many
domains share the chance of one false veto.
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
COMMON_SPREAD_AL = 0.15
"""By which changes of AL commonly differ between requests (standard deviation)."""
_PRIOR_FREEDOM = 4.0
"""Degrees of freedom that is worth."""


@dataclass(frozen=True)
class Gain:
    """Difference in simulated AL, over all anchors of the requests."""

    mean: float
    spread: float
    """Standard deviation of the change between prompts, were all of equal length."""
    num_effective: float
    """So many prompts of equal length are worth as much."""
    num_requests: int
    prior_spread: float = COMMON_SPREAD_AL

    @property
    def num_freedom(self) -> float:
        """Degrees of freedom of the standard error."""
        return _PRIOR_FREEDOM + self.num_effective - 1.0

    @property
    def std_error(self) -> float:
        """Moderated by the prior (Smyth, Stat. Appl. Genet. Mol. Biol. 3, 2004, eq. 2).

        Few requests may agree by chance, and Student's t alone then asks for gains no draft can have.
        """
        own = (self.num_effective - 1.0) * self.spread**2
        return sqrt((_PRIOR_FREEDOM * self.prior_spread**2 + own) / self.num_freedom / self.num_effective)

    def low(self, level: float) -> float:
        """What the true gain is below with probability `level` at most (one-sided)."""
        return self.mean - student_quantile(level, self.num_freedom) * self.std_error

    def high(self, level: float) -> float:
        """What the true gain is above with probability `level` at most (one-sided)."""
        return self.mean + student_quantile(level, self.num_freedom) * self.std_error


NO_EVIDENCE = Gain(mean=0.0, spread=0.0, num_effective=1.0, num_requests=0)


def paired_gain(candidate: Mapping[str, Score], incumbent: Mapping[str, Score], *, num_resamples: int) -> Gain:
    """Gain of candidate over incumbent on the requests both were scored on; NO_EVIDENCE without one.

    The gain is a ratio (change of tokens over anchors), its standard error that of the bootstrap, times sqrt(n / (n - 1)) for
    n prompts (Efron & Tibshirani 1993, ch. 6). Prompts of a anchors each are worth (sum a)^2 / sum a^2 equal ones (Kish 1965):
    a single long request cannot pass for many.
    """
    changes, anchors = _by_prompt(candidate, incumbent)
    num_prompts = len(changes)
    if num_prompts == 0:
        return NO_EVIDENCE
    picks = np.random.default_rng(_SEED).integers(0, num_prompts, size=(num_resamples, num_prompts))
    resampled = changes[picks].sum(axis=1) / anchors[picks].sum(axis=1)
    num_effective = float(anchors.sum() ** 2 / (anchors**2).sum())
    variance = float(resampled.var()) * num_prompts / max(num_prompts - 1, 1)
    return Gain(
        mean=float(changes.sum() / anchors.sum()),
        spread=sqrt(variance * num_effective),
        num_effective=num_effective,
        num_requests=len(candidate.keys() & incumbent.keys()),
    )


def student_quantile(level: float, num_freedom: float) -> float:
    """The value Student's t exceeds with probability `level`, after Wallace (Ann. Math. Stat. 30, 1959).

    It errs on the careful side: with 3 degrees of freedom or more, and for levels from 1e-4 on, the true probability is
    between half of `level` and `level`.
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
