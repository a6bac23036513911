"""The arithmetic behind the bars. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from loadtest.client import StreamResult

_NUM_RESAMPLES = 1000


@dataclass(frozen=True)
class Interval:
    """A stretch of the monotonic clock, seconds."""

    start_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s

    def overlaps(self, other: Interval) -> bool:
        return self.start_s < other.end_s and other.start_s < self.end_s


def gaps(result: StreamResult) -> list[Interval]:
    """The waits between the chunks of one stream; the wait for the first chunk is a prefill, not a gap."""
    times = result.chunk_times_s
    return [Interval(start, end) for start, end in pairwise(times)]


def prefills(results: Iterable[StreamResult]) -> list[Interval]:
    """When some request waited for its first chunk: steps then carry a prompt and take longer."""
    return [Interval(result.sent_at_s, result.chunk_times_s[0]) for result in results if result.chunk_times_s]


@dataclass(frozen=True)
class CommitGaps:
    """What commits did to the streams beside them."""

    extra_s: list[float]
    """Per commit without a prefill nearby: the gap around it less the gap around instants without a commit."""
    control_s: float
    """Median gap around instants halfway between commits, chosen in the same way as those around commits."""
    step_s: float
    """Median gap away from commits and prefills: one decode step."""
    num_beside_prefill: int
    """Commits left out because a prompt was being read at the same time."""
    num_unobserved: int
    """Commits during which no stream was between two chunks."""


def commit_gaps(results: Sequence[StreamResult], commits: Sequence[Interval]) -> CommitGaps:
    """Compare the gaps around commits with the gaps around instants halfway between them, prefills set apart.

    The control matters: the gap that covers a given instant is longer on average than a gap picked at random, and the
    longest of two neighbours longer still. Without it that bias would be charged to the commits.
    """
    busy = prefills(results)
    streams = [gaps(result) for result in results]
    quiet = [
        gap.length_s for stream in streams for gap in stream if not _overlaps_any(gap, busy) and not _overlaps_any(gap, commits)
    ]
    at_commits = [_gap_around(commit, streams, busy) for commit in commits]
    controls = [_gap_around(instant, streams, busy) for instant in halfway(commits)]
    usable = [value for value in controls if isinstance(value, float)]
    control_s = float(np.median(usable)) if usable else float("nan")
    return CommitGaps(
        extra_s=[value - control_s for value in at_commits if isinstance(value, float)],
        control_s=control_s,
        step_s=float(np.median(quiet)) if quiet else float("nan"),
        num_beside_prefill=at_commits.count("beside a prefill"),
        num_unobserved=at_commits.count("unobserved"),
    )


def halfway(commits: Sequence[Interval]) -> list[Interval]:
    """Between each two commits, an interval as long as the first of them."""
    shifts = [(first, (second.start_s - first.start_s) / 2) for first, second in pairwise(commits)]
    return [Interval(first.start_s + shift_s, first.end_s + shift_s) for first, shift_s in shifts]


def _gap_around(instant: Interval, streams: Sequence[Sequence[Interval]], busy: Sequence[Interval]) -> float | str:
    """The longest gap of each stream that overlaps `instant`, median over streams; in words where there is none to judge."""
    touched = [[gap for gap in stream if gap.overlaps(instant)] for stream in streams]
    longest = [max(stream, key=lambda gap: gap.length_s) for stream in touched if stream]
    if not longest:
        return "unobserved"
    if any(_overlaps_any(gap, busy) for gap in longest):
        return "beside a prefill"
    return float(np.median([gap.length_s for gap in longest]))


def _overlaps_any(gap: Interval, others: Sequence[Interval]) -> bool:
    return any(gap.overlaps(other) for other in others)


@dataclass(frozen=True)
class PairedRatio:
    """Mean of ratios of pairs, with its standard error."""

    mean: float
    standard_error: float
    num_pairs: int


def paired_ratio(treated: Sequence[float], control: Sequence[float]) -> PairedRatio:
    """Of treated[i] / control[i]."""
    ratios = np.asarray(treated, dtype=float) / np.asarray(control, dtype=float)
    error = float(ratios.std(ddof=1) / np.sqrt(len(ratios))) if len(ratios) > 1 else float("inf")
    return PairedRatio(float(ratios.mean()), error, len(ratios))


@dataclass(frozen=True)
class Estimate:
    """A number and the 95 % interval of its bootstrap."""

    value: float
    low: float
    high: float


def quantile_difference(treated: Sequence[float], control: Sequence[float], quantile: float) -> Estimate:
    """Quantile of `treated` less that of `control`; the samples are resampled apart, because they are not paired one to one."""
    return _bootstrap(treated, control, quantile, np.subtract)


def quantile_ratio(treated: Sequence[float], control: Sequence[float], quantile: float) -> Estimate:
    """Quantile of `treated` over that of `control`."""
    return _bootstrap(treated, control, quantile, np.divide)


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float | None]:
    """p50 and p99 in ms; None of nothing."""
    shares = {"p50": 0.5, "p99": 0.99}
    return {name: round(1e3 * float(np.quantile(seconds, share)), 2) if seconds else None for name, share in shares.items()}


def _bootstrap(treated: Sequence[float], control: Sequence[float], quantile: float, combine: np.ufunc) -> Estimate:
    rng = np.random.default_rng(0)
    samples = [np.asarray(values, dtype=float) for values in (treated, control)]
    resampled = [np.quantile(rng.choice(sample, (_NUM_RESAMPLES, len(sample))), quantile, axis=1) for sample in samples]
    value = combine(*(np.quantile(sample, quantile) for sample in samples))
    low, high = np.quantile(combine(*resampled), (0.025, 0.975))
    return Estimate(float(value), float(low), float(high))


def changed(results: Iterable[StreamResult], reference: dict[str, list[int]]) -> list[str]:
    """Ids of prompts whose tokens differ from the reference, one entry per differing answer."""
    return [result.prompt_id for result in results if result.token_ids != reference[result.prompt_id]]
