"""Speculation depth: buckets of batch sizes, and what GET /admin/depth says."""

from __future__ import annotations

from msgspec import Struct


def bucket_of(num_requests: int) -> int:
    """The largest batch size that is treated alike: 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, ..."""
    power = 1 << (num_requests - 1).bit_length()
    half_way = 3 * power // 4
    return half_way if num_requests <= half_way else power


def buckets_up_to(max_requests: int) -> list[int]:
    """All buckets that batches of 1..max_requests fall into, ascending."""
    return sorted({bucket_of(num_requests) for num_requests in range(1, max_requests + 1)})


class AcceptedPosition(Struct, frozen=True, kw_only=True):
    """How likely the active draft's proposal at one position, and all before it, are accepted."""

    share: float
    uncertainty: float
    """One standard deviation of `share`."""
    num_proposed: float
    """Proposals behind it, recent ones; 0 where the share is assumed from the position before."""
    age_s: float | None
    """Since the last such proposal; None where this draft made none."""


class DepthOption(Struct, frozen=True, kw_only=True):
    """One K in one bucket, as the controller sees it."""

    depth: int
    tokens_per_step: float
    """Expected of one request."""
    relative_step_time: float
    """To that of the K in force."""
    step_s: float | None
    """Expected; None until a step of this bucket was timed."""
    tokens_per_s: float | None
    """Expected of one request."""
    relative_speed: float
    """To that of the K in force."""
    uncertainty: float
    """One standard deviation of `relative_speed`, relative."""
    num_steps: int
    """Steps timed at this K in this bucket, in all."""
    source: str
    """Where the step time comes from: `now` (in force), `compared` (run in turn with another K), `interpolated` between such,
    `bucket n` (after that one) or `assumed`."""


class DepthBucket(Struct, frozen=True, kw_only=True):
    """Batches of like size on one engine."""

    max_requests: int
    depth: int
    """K in force, a trial in progress left out."""
    reason: str
    options: list[DepthOption]


class DepthChange(Struct, frozen=True, kw_only=True):
    """A change of the K of one bucket."""

    at_s: float
    """Unix time."""
    bucket: int
    before: int
    after: int
    reason: str


class DepthTrial(Struct, frozen=True, kw_only=True):
    """A short run at another K, to learn what it would bring."""

    bucket: int
    depth: int
    started_at_s: float
    reason: str


class EngineDepth(Struct, frozen=True, kw_only=True):
    """Depth control of one engine."""

    engine: str
    is_applied: bool
    """False: the engine has another table than this one, for a moment or because it does not answer."""
    draft_version: int | None
    acceptance: list[AcceptedPosition]
    buckets: list[DepthBucket]
    trial: DepthTrial | None
    num_trials: int
    num_changes: int
    trials_s: float
    """Decode time spent in trials."""
    lost_s: float
    """Of it, what the K in force would have saved, as far as can be told."""
    changes: list[DepthChange]
    """The last ones, the newest last."""


class DepthView(Struct, frozen=True, kw_only=True):
    """gateway -> operator: GET /admin/depth."""

    schema_version: int
    mode: str
    """`auto` or `fixed`."""
    engines: list[EngineDepth]
