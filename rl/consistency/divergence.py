"""How far training and inference are apart, from the tokens both have scored.

d = log pi - log mu of a token, pi the trainer's policy and mu what drew it; rho = e^d. Everything is float64: k3 of equal
weights in float32 is of the order of 1e-9, below the rounding of its own terms (`divergence_reference` states it all plainly).

Shape letters: T tokens.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from msgspec import Struct

from rl.algorithms.counts import TokenCounts
from rl.consistency.rescored import Floats, Rescored
from wire.errors import RolloutError
from wire.spec import SCHEMA_VERSION

BUCKET_EDGES = (0.0, 0.01, 0.1, 0.5, 0.9, 1.0)
"""Of the behaviour's probability: mismatch lives in unlikely tokens."""
_MAX_LOG_RATIO = 20.0
"""Keeps e^d of a token that one side thinks impossible from drowning every mean in infinity."""


class AbsLogprob(Struct, frozen=True, kw_only=True):
    """|d| over some tokens; all 0 where there are none."""

    num_tokens: int
    mean: float
    p99: float
    max: float


class Bucket(Struct, frozen=True, kw_only=True):
    """Tokens whose behaviour probability is in (low, high]."""

    low: float
    high: float
    abs_logprob: AbsLogprob


class DivergenceReport(Struct, frozen=True, kw_only=True, tag="divergence_report"):
    """trainer -> live view and disk."""

    schema_version: int
    abs_logprob: AbsLogprob
    buckets: tuple[Bucket, ...]
    k1: float
    """Mean of -d: KL(mu || pi) in nats, of either sign."""
    k3: float
    """Mean of e^d - 1 - d: the same, never negative."""
    mult_prob_error: float
    """Mean of e^|d| (NeMo RL's `token_mult_prob_error`)."""
    ess: float
    """Effective sample size as a share of the tokens: (mean rho)^2 / mean rho^2."""
    is_mean: float
    is_std: float
    """Of rho, before it is cut."""
    masked_fraction: float
    truncated_fraction: float
    clipped_fraction: float
    num_versions: int
    spans_mean: float
    """Stretches of one target version per sequence."""
    spans_max: int


def measure(rescored: Rescored, counts: TokenCounts) -> DivergenceReport:
    """counts: of the loss on the same tokens (all 0 where none was made). Raises RolloutError where there are no tokens."""
    if rescored.behaviour_T.size == 0:
        raise RolloutError("no tokens to compare training and inference on; score at least one rollout")
    d_T = rescored.trainer_T - rescored.behaviour_T
    bounded_T = np.clip(d_T, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    rho_T = np.exp(bounded_T)
    spans = _spans(rescored)
    return DivergenceReport(
        schema_version=SCHEMA_VERSION,
        abs_logprob=_abs_logprob(np.abs(d_T)),
        buckets=_buckets(np.abs(d_T), np.exp(rescored.behaviour_T)),
        k1=float(-d_T.mean()),
        k3=float((np.expm1(bounded_T) - bounded_T).mean()),
        mult_prob_error=float(np.exp(np.abs(bounded_T)).mean()),
        ess=float(rho_T.mean() ** 2 / np.square(rho_T).mean()),
        is_mean=float(rho_T.mean()),
        is_std=float(rho_T.std()),
        masked_fraction=counts.masked_fraction,
        truncated_fraction=counts.truncated_fraction,
        clipped_fraction=counts.clipped_fraction,
        num_versions=int(np.unique(rescored.version_T).size),
        spans_mean=float(spans.mean()),
        spans_max=int(spans.max()),
    )


def _abs_logprob(abs_T: Floats) -> AbsLogprob:
    if abs_T.size == 0:
        return AbsLogprob(num_tokens=0, mean=0.0, p99=0.0, max=0.0)
    p99 = float(np.quantile(abs_T, 0.99, method="inverted_cdf"))
    return AbsLogprob(num_tokens=abs_T.size, mean=float(abs_T.mean()), p99=p99, max=float(abs_T.max()))


def _buckets(abs_T: Floats, probability_T: Floats) -> tuple[Bucket, ...]:
    limits = pairwise(BUCKET_EDGES)
    return tuple(
        Bucket(low=low, high=high, abs_logprob=_abs_logprob(abs_T[(probability_T > low) & (probability_T <= high)]))
        for low, high in limits
    )


def _spans(rescored: Rescored) -> Floats:
    """Spans of each sequence: its first token begins one, so does each whose version is not its predecessor's."""
    _, index_T = np.unique(rescored.sequence_T, return_inverse=True)
    is_new_T = np.ones(index_T.size)
    is_new_T[1:] = (np.diff(index_T) != 0) | (np.diff(rescored.version_T) != 0)
    return np.asarray(np.bincount(index_T, is_new_T), np.float64)
