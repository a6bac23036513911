"""The arithmetic behind the bars. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from loadtest.client import StreamResult


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
    """Per commit without a prefill nearby: the gap around it, median over streams, less the usual gap."""
    usual_s: float
    """Median gap away from commits and prefills: one decode step."""
    num_beside_prefill: int
    """Commits left out because a prompt was being read at the same time."""
    num_unobserved: int
    """Commits during which no stream was between two chunks."""


def commit_gaps(results: Sequence[StreamResult], commits: Sequence[Interval]) -> CommitGaps:
    """Compare the gaps that overlap each commit with all others. Gaps beside a prefill count for neither."""
    busy = prefills(results)
    streams = [gaps(result) for result in results]
    quiet = [
        gap.length_s for stream in streams for gap in stream if not _overlaps_any(gap, busy) and not _overlaps_any(gap, commits)
    ]
    usual_s = float(np.median(quiet)) if quiet else float("nan")
    extra_s: list[float] = []
    num_beside_prefill = num_unobserved = 0
    for commit in commits:
        touched = [[gap for gap in stream if gap.overlaps(commit)] for stream in streams]
        longest = [max(stream, key=lambda gap: gap.length_s) for stream in touched if stream]
        if not longest:
            num_unobserved += 1
        elif any(_overlaps_any(gap, busy) for gap in longest):
            num_beside_prefill += 1
        else:
            extra_s.append(float(np.median([gap.length_s for gap in longest])) - usual_s)
    return CommitGaps(extra_s, usual_s, num_beside_prefill, num_unobserved)


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


def changed(results: Iterable[StreamResult], reference: dict[str, list[int]]) -> list[str]:
    """Ids of prompts whose tokens differ from the reference, one entry per differing answer."""
    return [result.prompt_id for result in results if result.token_ids != reference[result.prompt_id]]
