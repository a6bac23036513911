"""Swap blip: do clients notice when a draft is swapped in?

A window of ±Δ lies around each commit, and a control window of the same length halfway between each two swaps. Before the first
swap and after the last, controls stand evenly, a window's length apart: where swaps follow one another too closely to leave room
between them, those are all there is. A control is chosen as blindly as a swap: the wait that covers a given instant is longer than one
picked at random, and the longest of a window longer still, with or without a swap.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from loadtest.measures import bootstrap, definitions
from loadtest.measures.histogram import BlockHistogram, Floats
from loadtest.records import COMMITTED, RequestRecord, Swap
from loadtest.statistics import Estimate, Interval, halfway, quantile_difference

MARGIN_S = 2.0
"""Δ is this and the longest of the swaps, so that every window, controls too, is as long and holds the loading of its draft."""
MIN_REQUESTS = 10
"""Fewer on either side say nothing."""
MIN_WINDOWS = 5
"""From so many on, windows are drawn again and not requests: a stall hits all streams of its window at once."""


@dataclass
class WindowTally:
    """What clients saw within one window."""

    longest_gaps_s: list[float] = field(default_factory=list)
    """The longest wait between two chunks that touches the window, one for each stream."""
    ttfts_s: list[float] = field(default_factory=list)
    """Of requests that had to be sent within the window."""
    num_requests: int = 0
    num_failed: int = 0
    """Failed or truncated, of requests that were open at some time within the window."""


@dataclass(frozen=True)
class SwapEffect:
    """One swap."""

    at_s: float
    """When the attempt began."""
    version: int
    trigger: str
    largest_gap_ms: float | None
    ttft_p99_ms: float | None
    num_requests: int
    num_failed: int


@dataclass(frozen=True)
class SwapBlip:
    """All swaps against all controls. Every difference is swap less control."""

    half_width_s: float
    swaps: list[SwapEffect]
    num_controls: int
    num_without_control: int
    """Controls left out because another swap was too near."""
    unit: str
    """What the bootstrap draws again: `window`, or `request` where there are fewer than 5 windows of a kind."""
    longest_gap_p99_ms: Estimate | None
    """Difference of the p99 over streams of a stream's longest wait within a window. Not the median: most streams of a window
    end before its swap or begin after it."""
    largest_gap_ms: tuple[float, float] | None
    """The largest of all: beside swaps, and beside as many controls."""
    ttft_p99_ms: Estimate | None
    failed_share: Estimate | None
    verdict: str
    """`worse` where an interval lies above 0, `no blip` where none does, `undecided` where there was too little to compare."""


def swap_blip(records: Iterable[RequestRecord], swaps: Sequence[Swap], span: Interval) -> SwapBlip | None:
    """Over the committed swaps within the span; None without any."""
    committed = [swap for swap in swaps if swap.outcome == COMMITTED and span.start_s <= swap.at_s < span.end_s]
    if not committed:
        return None
    half_width_s = MARGIN_S + max(swap.duration_s for swap in committed)
    instants_s = [swap.at_s + swap.duration_s for swap in committed]
    around = [Interval(at_s - half_width_s, at_s + half_width_s) for at_s in instants_s]
    before, after = Interval(span.start_s, around[0].start_s), Interval(around[-1].end_s, span.end_s)
    wanted = [*_evenly(before, half_width_s), *halfway(around), *_evenly(after, half_width_s)]
    controls = [window for window in wanted if not any(window.overlaps(swap) for swap in around)]
    at_swaps, at_controls = [WindowTally() for _ in around], [WindowTally() for _ in controls]
    windows = sorted(zip([*around, *controls], [*at_swaps, *at_controls], strict=True), key=lambda pair: pair[0].start_s)
    starts_s = [window.start_s for window, _ in windows]
    for record in records:
        # All windows are equally long, so those that a request was open in lie side by side.
        begin = bisect_right(starts_s, record.intended_at_s - 2 * half_width_s)
        for window, tally in windows[begin : bisect_left(starts_s, record.ended_at_s)]:
            note(tally, window, record)
    return SwapBlip(
        half_width_s=half_width_s,
        swaps=[_effect(swap, tally) for swap, tally in zip(committed, at_swaps, strict=True)],
        num_controls=len(controls),
        num_without_control=len(wanted) - len(controls),
        **_differences(at_swaps, at_controls),
    )


def _evenly(calm: Interval, half_width_s: float) -> list[Interval]:
    """As many windows as lie in a stretch without swaps with a window's length between any two."""
    number = int(calm.length_s // (4 * half_width_s))
    middles_s = [calm.start_s + (index + 0.5) * calm.length_s / number for index in range(number)]
    return [Interval(middle_s - half_width_s, middle_s + half_width_s) for middle_s in middles_s]


def note(tally: WindowTally, window: Interval, record: RequestRecord) -> None:
    """Enter a request that was open within the window."""
    touching = [
        later - earlier for earlier, later in pairwise(record.chunk_times_s) if Interval(earlier, later).overlaps(window)
    ]
    if touching:
        tally.longest_gaps_s.append(max(touching))
    ttft_s = definitions.ttft_s(record)
    if ttft_s is not None and window.start_s <= record.intended_at_s < window.end_s:
        tally.ttfts_s.append(ttft_s)
    tally.num_requests += 1
    tally.num_failed += record.outcome in ("failed", "truncated")


def _differences(at_swaps: Sequence[WindowTally], at_controls: Sequence[WindowTally]) -> dict[str, Any]:
    """The fields of SwapBlip that compare swaps with controls."""
    gap = _difference_ms([tally.longest_gaps_s for tally in at_swaps], [tally.longest_gaps_s for tally in at_controls], 0.99)
    ttft = _difference_ms([tally.ttfts_s for tally in at_swaps], [tally.ttfts_s for tally in at_controls], 0.99)
    failed = bootstrap.difference(_failed(at_swaps), _failed(at_controls)) if at_controls else None
    known = [estimate for estimate in (gap, ttft, failed) if estimate is not None]
    return {
        "unit": "window" if min(len(at_swaps), len(at_controls)) >= MIN_WINDOWS else "request",
        "longest_gap_p99_ms": gap,
        "largest_gap_ms": _largest_ms(at_swaps, at_controls),
        "ttft_p99_ms": ttft,
        "failed_share": failed,
        "verdict": "worse" if any(estimate.low > 0 for estimate in known) else "no blip" if gap and ttft else "undecided",
    }


def _all_gaps(tallies: Sequence[WindowTally]) -> list[float]:
    return [gap for tally in tallies for gap in tally.longest_gaps_s]


def _difference_ms(treated_s: Sequence[list[float]], control_s: Sequence[list[float]], share: float) -> Estimate | None:
    """Of quantiles, values by window; None of too few."""
    treated, control = ([value for window in side for value in window] for side in (treated_s, control_s))
    if min(len(treated), len(control)) < MIN_REQUESTS:
        return None
    if min(len(treated_s), len(control_s)) < MIN_WINDOWS:
        found = quantile_difference(treated, control, share)
    else:
        sides = [_resampled(side, share, seed) for seed, side in enumerate((treated_s, control_s))]
        number = min(len(treated_s), len(control_s))
        found = bootstrap.around(sides[0][0] - sides[1][0], sides[0][1:] - sides[1][1:], number)
    return Estimate(1e3 * found.value, 1e3 * found.low, 1e3 * found.high)


def _resampled(windows: Sequence[list[float]], share: float, seed: int) -> Floats:
    """The quantile of all windows, and those of the resamples that draw whole windows again."""
    numbers = np.repeat(np.arange(len(windows)), [len(window) for window in windows])
    histogram = BlockHistogram(np.concatenate([np.asarray(window) for window in windows]), numbers, len(windows))
    (resamples,) = histogram.resampled(bootstrap.equal(len(windows), seed=seed).weights, [share])
    return np.concatenate([[histogram.quantile(share)], resamples])


def _largest_ms(at_swaps: Sequence[WindowTally], at_controls: Sequence[WindowTally]) -> tuple[float, float] | None:
    """A maximum grows with the number of windows, so both sides get the same number."""
    number = min(len(at_swaps), len(at_controls))
    sides = [_all_gaps(tallies[:number]) for tallies in (at_swaps, at_controls)]
    return (1e3 * max(sides[0]), 1e3 * max(sides[1])) if all(sides) else None


def _failed(tallies: Sequence[WindowTally]) -> Estimate:
    return bootstrap.wilson(sum(tally.num_failed for tally in tallies), sum(tally.num_requests for tally in tallies))


def _effect(swap: Swap, tally: WindowTally) -> SwapEffect:
    return SwapEffect(
        at_s=swap.at_s,
        version=swap.version,
        trigger=swap.trigger,
        largest_gap_ms=1e3 * max(tally.longest_gaps_s) if tally.longest_gaps_s else None,
        ttft_p99_ms=1e3 * float(np.quantile(tally.ttfts_s, 0.99)) if tally.ttfts_s else None,
        num_requests=tally.num_requests,
        num_failed=tally.num_failed,
    )
