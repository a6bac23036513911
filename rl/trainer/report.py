"""A step's report from what it computed.

Shape letters: N rollouts and S output tokens of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace
from torch import Tensor

from rl.algorithms.counts import TokenCounts
from rl.consistency.alarms import FLOORS, HEALTH, alarms
from rl.consistency.divergence import DivergenceReport, measure
from rl.consistency.rescored import Rescored
from rl.staleness.distribution import staleness
from rl.trainer.batch import Batch
from rl.trainer.metrics import Spread, StepReport, UpdateMetrics, finite
from rl.trajectory import Group, num_output_tokens


def report(
    step: int,
    version: int,
    groups: Sequence[Group],
    batch: Batch,
    found_NS: tuple[Tensor, Tensor] | None,
    counts: TokenCounts,
    updates: tuple[UpdateMetrics, ...],
    dtype: str,
) -> StepReport:
    """found_NS: log-probabilities and entropies the policy that took the batch up gave its tokens; None for an empty batch."""
    bare = StepReport(
        step=step,
        version=version,
        num_groups=len(groups),
        dropped_group_ids=batch.dropped_group_ids,
        num_rollouts=len(batch.shaped_rewards),
        num_failed=batch.num_failed,
        num_tokens=sum(sample.num_outputs for sample in batch.samples),
        updates=updates,
    )
    rollouts = [rollout for group in groups for rollout in group.scored_rollouts]
    if rollouts:
        bare = replace(
            bare,
            rewards=Spread.of([rollout[0].reward for rollout in rollouts]),
            output_tokens=Spread.of([num_output_tokens(rollout) for rollout in rollouts]),
            truncated_rollout_fraction=sum(rollout[-1].is_truncated for rollout in rollouts) / len(rollouts),
        )
    if found_NS is None:
        return bare
    logprobs_NS, entropies_NS = found_NS
    trajectories = [sample.trajectory for sample in batch.samples]
    consistency, floor = _divergence(batch, logprobs_NS, counts, version)
    found = [
        *(alarms(consistency, HEALTH) if consistency is not None else []),
        *(alarms(floor, FLOORS[dtype]) if floor is not None else []),
    ]
    return replace(
        bare,
        entropy=finite(float(entropies_NS.double().sum()) / bare.num_tokens),
        shaped_rewards=Spread.of(batch.shaped_rewards),
        consistency=consistency,
        floor=floor,
        staleness=staleness(trajectories, version),
        alarms=tuple(alarm.text for alarm in found),
    )


def _divergence(
    batch: Batch, logprobs_NS: Tensor, counts: TokenCounts, version: int
) -> tuple[DivergenceReport | None, DivergenceReport | None]:
    """(of all tokens, of those this very version drew); none where a log-probability is not finite."""
    if not bool(logprobs_NS.isfinite().all()):
        return None, None
    logprobs = [logprobs_NS[row, : sample.num_outputs].tolist() for row, sample in enumerate(batch.samples)]
    rescored = Rescored.of([sample.trajectory for sample in batch.samples], logprobs)
    own = rescored.of_version(version)
    return measure(rescored, counts), measure(own, TokenCounts()) if own.trainer_T.size else None
