"""What a depth controller knows, in the words of GET /admin/depth."""

from __future__ import annotations

from math import exp

from server.depth.bucket import Bucket
from server.depth.controller import DepthController, describe
from server.depth.survival import expected_tokens
from server.depth.trial import Trial
from wire.depth import AcceptedPosition, DepthBucket, DepthOption, DepthTrial, EngineDepth


def engine_depth(engine_id: str, controller: DepthController, *, is_applied: bool) -> EngineDepth:
    return EngineDepth(
        engine=engine_id,
        is_applied=is_applied,
        draft_version=controller.draft_version,
        acceptance=_acceptance(controller),
        buckets=[_bucket(controller, bucket) for bucket in controller.buckets.values()],
        trial=_trial(controller.trial) if controller.trial is not None else None,
        num_trials=controller.num_trials,
        num_changes=controller.num_changes,
        trials_s=controller.trials_s,
        lost_s=controller.budget.lost_s,
        changes=list(controller.changes),
    )


def _trial(trial: Trial) -> DepthTrial:
    return DepthTrial(bucket=trial.bucket.limit, depth=trial.depth, started_at_s=trial.started_at_s, reason=trial.reason)


def _acceptance(controller: DepthController) -> list[AcceptedPosition]:
    survival = controller.survival
    return [
        AcceptedPosition(
            share=share.mean,
            uncertainty=share.deviation,
            num_proposed=survival.num_proposed(position),
            age_s=None if seen_s is None else controller.updated_s - seen_s,
        )
        for position, (share, seen_s) in enumerate(zip(controller.shares, survival.seen_s, strict=True))
    ]


def _bucket(controller: DepthController, bucket: Bucket) -> DepthBucket:
    others = [depth for depth in range(controller.max_depth + 1) if depth != bucket.depth]
    gains = {depth: controller.gain(bucket, depth) for depth in others}
    next_best = max(others, key=lambda depth: gains[depth].mean)
    return DepthBucket(
        max_requests=bucket.limit,
        depth=bucket.depth,
        reason=f"{bucket.reason}; next best now: K={next_best}, {describe(gains[next_best])}",
        options=[_option(controller, bucket, depth) for depth in range(controller.max_depth + 1)],
    )


def _option(controller: DepthController, bucket: Bucket, depth: int) -> DepthOption:
    num_tokens = expected_tokens(controller.shares, depth)
    relative_time = exp(controller.step_time(bucket, depth).mean)
    step_s = None if bucket.step_s is None else bucket.step_s * relative_time
    gain = controller.gain(bucket, depth)
    return DepthOption(
        depth=depth,
        tokens_per_step=num_tokens,
        relative_step_time=relative_time,
        step_s=step_s,
        tokens_per_s=None if step_s is None else num_tokens / step_s,
        relative_speed=exp(gain.mean),
        uncertainty=gain.deviation,
        num_steps=bucket.num_steps[depth],
        source=_source(controller, bucket, depth),
    )


def _source(controller: DepthController, bucket: Bucket, depth: int) -> str:
    if depth == bucket.depth:
        return "now"
    if bucket.costs is not None:
        return "compared" if depth in bucket.costs.compared else "interpolated"
    nearest = controller.nearest(bucket)
    return f"bucket {nearest.limit}" if nearest is not None else "assumed"
