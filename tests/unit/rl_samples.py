"""Rollouts for tests, valid unless a test asks for something else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl.trajectory import Group, RewardPart, Timings, Trajectory, Turn, WeightSpan
from wire.spec import SCHEMA_VERSION


def make_turn(versions: Sequence[int] = (3, 3, 3), **changes: Any) -> Turn:
    """A turn with one output token of each version given."""
    spans = tuple(WeightSpan(target_version=version, start=index, end=index + 1) for index, version in enumerate(versions))
    fields: dict[str, Any] = {
        "prompt_token_ids": (5, 6),
        "output_token_ids": tuple(range(len(versions))),
        "behaviour_logprobs": tuple(-0.5 for _ in versions),
        "weight_spans": spans,
        "draft_version": 1,
        "finish_reason": "stop",
    }
    return Turn(**fields | changes)


def make_trajectory(versions: Sequence[int] = (3, 3, 3), **changes: Any) -> Trajectory:
    fields: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "group_id": 0,
        "sample_index": 0,
        "environment": "sums",
        "environment_seed": 7,
        "temperature": 1.0,
        "turns": (make_turn(versions),),
        "reward_parts": (RewardPart(name="right", value=1.0),),
        "timings": Timings(submitted_s=1.0, generated_s=2.0, scored_s=2.5),
    }
    return Trajectory(**fields | changes)


def make_group(
    group_id: int, versions: Sequence[int] = (3, 3, 3), rewards: Sequence[float] = (0.0, 1.0), *, environment_seed: int = 7
) -> Group:
    return Group(
        trajectories=tuple(
            make_trajectory(
                versions,
                group_id=group_id,
                sample_index=index,
                environment_seed=environment_seed,
                reward_parts=(RewardPart(name="right", value=reward),),
            )
            for index, reward in enumerate(rewards)
        )
    )
