"""DepthController: chooses K for every bucket of batch sizes of one engine. Pure: readings in, a table out.

A request emits `tokens(K) = 1 + sum of P(more than i accepted), i < K` tokens in a step that takes `time(bucket, K)`; the best
K has the most tokens per second. Both are estimates with deviations, and one rule each for using and for improving them:

- A bucket changes to another K when that is faster for certain: by MIN_GAIN, and by CERTAIN deviations, in several readings.
- Another K is tried when it may be faster: when HOPEFUL deviations more would make it so. The least costly trial comes first
  and all together lose no more than a small share of the decode time. What is not tried grows uncertain with time, and a new
  draft is uncertain from the start, so a K that was given up is found again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from math import exp, hypot, inf, log, log2
from typing import NamedTuple

from server.depth.bucket import Bucket
from server.depth.costs import StepCosts
from server.depth.estimate import Estimate
from server.depth.readings import Reading
from server.depth.survival import Survival, expected_tokens
from server.depth.trial import TRIAL_STEPS, Budget, Trial
from wire.depth import DepthChange, bucket_of, buckets_up_to

MIN_GAIN = 0.02
"""Logarithm of the speed-up below which a change is not worth it."""
CERTAIN = 2.0
HOPEFUL = 2.0
CONFIRMATIONS = 3
"""Readings in a row that must find the same K better."""
ACTIVE_S = 3.0
"""A bucket has traffic if steps were timed in it that recently."""
FIRST_NOISE = 0.08
MIN_NOISE, MAX_NOISE = 0.01, 0.3
"""Deviation of one measured logarithm of a ratio."""
NOISE_MEMORY = 0.1
PATIENCE_S = 0.5
"""A trial waits since the last one until what it hopes to gain, times the wait, comes to that."""
READING_S = 1.0
"""Between two readings, about; a trial runs at least until the next one."""
KEPT_CHANGES = 32


class _Chance(NamedTuple):
    """A trial that may show a better K."""

    bucket: Bucket
    depth: int
    gain: Estimate
    baseline_s: float
    loss_s: float
    """What it is expected to cost."""

    @property
    def hope(self) -> float:
        return self.gain.mean + HOPEFUL * self.gain.deviation


class DepthController:
    """`depths` is K by batch size of 1, 2, ... requests as the engine has it."""

    def __init__(self, depths: Sequence[int], max_depth: int) -> None:
        self.max_depth = max_depth
        self.max_requests = len(depths)
        self.buckets = {limit: Bucket(limit, depths[min(limit, len(depths)) - 1]) for limit in buckets_up_to(len(depths))}
        self.survival = Survival(max_depth)
        self.budget = Budget()
        self.trial: Trial | None = None
        self.draft_version: int | None = None
        self.changes: deque[DepthChange] = deque(maxlen=KEPT_CHANGES)
        self.num_changes = 0
        self.num_trials = 0
        self.trials_s = 0.0
        self._trial_ended_s: float | None = None
        self._noise_variance = FIRST_NOISE**2
        self.updated_s = 0.0
        """Of the last reading, as its caller tells time."""
        self._shares: list[Estimate] = self.survival.shares(0.0)
        self._assumed = StepCosts(max_depth)

    @property
    def shares(self) -> list[Estimate]:
        """P(more than i proposals accepted), as of the last reading."""
        return self._shares

    def table(self) -> list[int]:
        """K for batches of 1, 2, ... requests, a trial included."""
        depths = [self.buckets[bucket_of(number)].depth for number in range(1, self.max_requests + 1)]
        if self.trial is not None:
            limit = self.trial.bucket.limit
            depths = [self.trial.depth if bucket_of(number) == limit else depth for number, depth in enumerate(depths, start=1)]
        return depths

    def observe(self, reading: Reading, now_s: float) -> None:
        """Learn from a reading and change nothing."""
        self.draft_version = reading.draft_version
        self.survival.observe(reading.draft_version, reading.tally, now_s)
        self._shares = self.survival.shares(now_s)
        for bucket in self.buckets.values():
            if bucket.costs is not None:
                bucket.costs.age(max(now_s - self.updated_s, 0.0))
        self.updated_s = now_s
        trial = self.trial
        for (limit, depth), steps in reading.steps.items():
            self.budget.earn(steps.total_s)
            if limit in self.buckets and depth <= self.max_depth:
                self.buckets[limit].take(depth, steps, now_s)
                if trial is not None and (limit, depth) == (trial.bucket.limit, trial.depth):
                    trial.take(steps)

    def update(self, reading: Reading, now_s: float) -> None:
        """Learn from a reading, then change what is certain and try what is hopeful."""
        self.observe(reading, now_s)
        if self.trial is not None and self.trial.is_over(now_s):
            self._end_trial(self.trial, now_s)
        if not reading.steps:
            return
        for bucket in self.buckets.values():
            if self.trial is None or self.trial.bucket is not bucket:
                self._decide(bucket, now_s)
        if self.trial is None:
            self._begin_trial(now_s)

    def forget_acceptance(self) -> None:
        """Another target is followed from now on. What steps cost is not of its weights, and stays known."""
        self.survival.forget()
        self._shares = self.survival.shares(self.updated_s)
        for bucket in self.buckets.values():
            bucket.challenger = (bucket.depth, 0)

    def gain(self, bucket: Bucket, depth: int) -> Estimate:
        """Logarithm of the speed at this K over the speed at the K in force."""
        low, high = sorted((depth, bucket.depth))
        tokens = expected_tokens(self._shares, depth), expected_tokens(self._shares, bucket.depth)
        time = self.step_time(bucket, depth)
        # Positions err together: a draft that is better than thought is so at all of them.
        tokens_deviation = sum(share.deviation for share in self._shares[low:high]) / max(tokens)
        return Estimate(log(tokens[0] / tokens[1]) - time.mean, hypot(tokens_deviation, time.deviation))

    def step_time(self, bucket: Bucket, depth: int) -> Estimate:
        """Logarithm of the step time at this K over that at the K in force.

        As measured in the bucket, else after the nearest one where K were compared, else as assumed.
        """
        costs, num_octaves = self._costs(bucket)
        return costs.log_ratio(depth, bucket.depth, num_octaves=num_octaves)

    def nearest(self, bucket: Bucket) -> Bucket | None:
        """The bucket of most like size in which K were compared."""
        known = [other for other in self.buckets.values() if other.costs is not None]
        return min(known, key=lambda other: abs(log2(bucket.limit / other.limit)), default=None)

    def _costs(self, bucket: Bucket) -> tuple[StepCosts, float]:
        """What is known of its steps, and how many doublings away it was learnt."""
        if bucket.costs is not None:
            return bucket.costs, 0.0
        nearest = self.nearest(bucket)
        if nearest is None or nearest.costs is None:
            return self._assumed, 0.0
        return nearest.costs, abs(log2(bucket.limit / nearest.limit))

    def _decide(self, bucket: Bucket, now_s: float) -> None:
        gains = {depth: self.gain(bucket, depth) for depth in self._others(bucket)}
        best = max(gains, key=lambda depth: gains[depth].mean - CERTAIN * gains[depth].deviation)
        gain = gains[best]
        if gain.mean <= MIN_GAIN or gain.mean <= CERTAIN * gain.deviation:
            bucket.challenger = (bucket.depth, 0)
            return
        depth, count = bucket.challenger
        count = count + 1 if depth == best else 1
        bucket.challenger = (best, count)
        if count >= CONFIRMATIONS:
            self._change(bucket, best, self._because(bucket, best, gain), now_s)

    def _change(self, bucket: Bucket, depth: int, reason: str, now_s: float) -> None:
        self.num_changes += 1
        self.changes.append(DepthChange(at_s=now_s, bucket=bucket.limit, before=bucket.depth, after=depth, reason=reason))
        bucket.change(depth, reason)

    def _begin_trial(self, now_s: float) -> None:
        waited_s = inf if self._trial_ended_s is None else now_s - self._trial_ended_s
        chances = [
            chance
            for chance in self._chances(now_s)
            if self.budget.affords(chance.loss_s) and chance.hope * waited_s >= PATIENCE_S
        ]
        if not chances:
            return
        best = min(chances, key=lambda chance: (chance.loss_s, -chance.hope))
        reason = f"K={best.depth} against K={best.bucket.depth}: {describe(best.gain)} expected"
        self.trial = Trial(best.bucket, best.depth, best.baseline_s, now_s, reason)

    def _chances(self, now_s: float) -> Iterator[_Chance]:
        """Trials that could show a better K, in buckets with traffic."""
        for bucket in self.buckets.values():
            baseline_s = bucket.baseline_s(now_s)
            if baseline_s is None or bucket.seen_s is None or now_s - bucket.seen_s > ACTIVE_S:
                continue
            for depth in self._others(bucket):
                gain = self.gain(bucket, depth)
                step_s = baseline_s * exp(self.step_time(bucket, depth).mean)
                chance = _Chance(bucket, depth, gain, baseline_s, _loss(gain, TRIAL_STEPS * step_s + READING_S))
                if chance.hope > MIN_GAIN:
                    yield chance

    def _end_trial(self, trial: Trial, now_s: float) -> None:
        bucket = trial.bucket
        if trial.num_steps:
            if bucket.costs is None:
                costs, num_octaves = self._costs(bucket)
                bucket.costs = costs.borrowed(num_octaves)
            log_ratio = log(trial.total_s / trial.num_steps / trial.baseline_s)
            # A trial that was cut short tells less.
            noise_variance = self._noise_variance * max(TRIAL_STEPS / trial.num_steps, 1.0)
            noise = bucket.costs.observe(trial.depth, bucket.depth, log_ratio, noise_variance)
            variance = self._noise_variance + NOISE_MEMORY * (noise - self._noise_variance)
            self._noise_variance = min(max(variance, MIN_NOISE**2), MAX_NOISE**2)
        self.budget.spend(_loss(self.gain(bucket, trial.depth), trial.total_s))
        self.num_trials += 1
        self.trials_s += trial.total_s
        self.trial, self._trial_ended_s = None, now_s
        bucket.forget_baseline()

    def _others(self, bucket: Bucket) -> list[int]:
        return [depth for depth in range(self.max_depth + 1) if depth != bucket.depth]

    def _because(self, bucket: Bucket, depth: int, gain: Estimate) -> str:
        tokens = [expected_tokens(self._shares, each) for each in (depth, bucket.depth)]
        time = exp(self.step_time(bucket, depth).mean)
        return (
            f"K={depth} is faster than K={bucket.depth} by {describe(gain)}: "
            f"{tokens[0]:.2f} against {tokens[1]:.2f} tokens a step, which takes {time:.2f} times as long"
        )


def _loss(gain: Estimate, duration_s: float) -> float:
    """Seconds lost by running that long at a K that is slower."""
    return duration_s * max(1.0 - exp(gain.mean), 0.0)


def describe(gain: Estimate) -> str:
    """In per cent, with its deviation."""
    return f"{100.0 * (exp(gain.mean) - 1.0):+.0f} % (± {100.0 * gain.deviation:.0f})"
