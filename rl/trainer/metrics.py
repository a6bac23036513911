"""What a step did: trainer -> live view and disk."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from msgspec import Struct

from rl.consistency.divergence import DivergenceReport
from rl.staleness.distribution import StalenessReport
from wire.spec import SCHEMA_VERSION


def finite(value: float) -> float | None:
    """The value, None where it is not finite, which JSON cannot say."""
    return value if isfinite(value) else None


class UpdateMetrics(Struct, frozen=True, kw_only=True):
    """One optimiser step, or one that was left out. What is None is not finite."""

    loss: float | None
    kl_loss: float | None
    """The part of the loss that the KL to the reference policy is."""
    grad_norm: float | None
    """Before it was clipped."""
    learning_rate: float
    num_tokens: int
    masked_fraction: float
    truncated_fraction: float
    """Tokens whose importance weight was cut to its cap."""
    clipped_high_fraction: float
    clipped_low_fraction: float
    skipped: str | None = None
    """Why the weights were not moved."""


class Spread(Struct, frozen=True, kw_only=True):
    mean: float
    std: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of one value or more; the standard deviation is the population's."""
        mean = sum(values) / len(values)
        variance = sum((value - mean) ** 2 for value in values) / len(values)
        return cls(mean=mean, std=variance**0.5, min=min(values), max=max(values))


class StepReport(Struct, frozen=True, kw_only=True, tag="train_step"):
    """One batch. Where nothing in it teaches anything, there is no update and what the policy says of rollouts is None; so is a mean
    that is not finite."""

    schema_version: int = SCHEMA_VERSION
    step: int
    """Counts batches from 0."""
    version: int
    """Of the target whose weights took the batch up."""
    num_groups: int
    dropped_group_ids: tuple[int, ...]
    """All their rewards are equal; evict them."""
    num_rollouts: int
    """That were learned from."""
    num_failed: int
    num_tokens: int
    """That were learned from."""
    updates: tuple[UpdateMetrics, ...]
    entropy: float | None = None
    """Mean over the tokens learned from, nats, at the temperature each was drawn at."""
    rewards: Spread | None = None
    """As they are in the record, a reward model's share included, of every rollout that was scored. Those of dropped groups count: without
    them a mean says how hard the prompts are that still teach something, not how well the policy does."""
    shaped_rewards: Spread | None = None
    """With what length takes from them, of the rollouts learned from."""
    output_tokens: Spread | None = None
    """By rollout that was scored."""
    truncated_rollout_fraction: float | None = None
    """Of those that were scored."""
    consistency: DivergenceReport | None = None
    """None also where a log-probability is not finite."""
    floor: DivergenceReport | None = None
    """Of the tokens drawn by these very weights; None where there are none."""
    staleness: StalenessReport | None = None
    alarms: tuple[str, ...] = ()

    @property
    def skipped(self) -> tuple[str, ...]:
        return tuple(update.skipped for update in self.updates if update.skipped is not None)
