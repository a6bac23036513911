"""AL and acceptance by position, over the measured span, by domain and by draft version; and what a token cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from loadtest.measures import bootstrap
from loadtest.measures.bootstrap import Blocks
from loadtest.measures.histogram import Floats, sums_by
from loadtest.measures.timeline import Verified, Window, pooled
from loadtest.statistics import Estimate, Interval


@dataclass(frozen=True)
class Acceptance:
    """Of one domain or version."""

    acceptance_length: Estimate
    by_position: list[float]
    """Share of verify steps whose proposal at this position was accepted."""
    num_steps: float
    num_accepted: float
    num_proposed: float
    """0 where nobody counts them."""


@dataclass(frozen=True)
class Cost:
    """Processor and GPU seconds of the system for a token. An effective token is an accepted proposal."""

    cpu_s_per_token: Estimate
    cpu_s_per_accepted_token: Estimate
    gpu_s_per_token: Estimate
    gpu_s_per_accepted_token: Estimate
    cpu_s: dict[str, float]
    """By process."""
    gpu_s: dict[str, float]
    """By GPU."""
    num_tokens: float
    num_accepted: float


def inside(windows: Sequence[Window], span: Interval) -> list[Window]:
    """The windows whose middle lies in the span."""
    return [window for window in windows if span.start_s <= (window.start_s + window.end_s) / 2 < span.end_s]


def acceptance(windows: Sequence[Window], by_window: Sequence[Verified], blocks: Blocks) -> Acceptance:
    """AL of what was verified in each window, with an interval."""
    steps = _by_block([verified.steps for verified in by_window], windows, blocks)
    accepted = _by_block([sum(verified.accepted) for verified in by_window], windows, blocks)
    whole = pooled(by_window)
    return Acceptance(
        acceptance_length=bootstrap.ratio(blocks, steps + accepted, steps),
        by_position=whole.acceptance_by_position,
        num_steps=whole.steps,
        num_accepted=sum(whole.accepted),
        num_proposed=whole.proposed,
    )


def _by_block(amounts: Sequence[float], windows: Sequence[Window], blocks: Blocks) -> Floats:
    middles_s = np.asarray([(window.start_s + window.end_s) / 2 for window in windows])
    return sums_by(blocks.of(middles_s), np.asarray(amounts, dtype=float), blocks.number)


def overall(windows: Sequence[Window], blocks: Blocks) -> Acceptance:
    return acceptance(windows, [window.of_domain(None) for window in windows], blocks)


def by_domain(windows: Sequence[Window], blocks: Blocks) -> dict[str, Acceptance]:
    domains = sorted({domain for window in windows for domain, _ in window.verified})
    found = {domain: acceptance(windows, [window.of_domain(domain) for window in windows], blocks) for domain in domains}
    return {domain: result for domain, result in found.items() if result.num_steps}


def by_version(windows: Sequence[Window], blocks: Blocks) -> dict[str, Acceptance]:
    versions = sorted({version for window in windows for _, version in window.verified}, key=lambda word: (len(word), word))
    of_version = {
        version: [pooled(part for (_, label), part in window.verified.items() if label == version) for window in windows]
        for version in versions
    }
    found = {version: acceptance(windows, parts, blocks) for version, parts in of_version.items()}
    return {version: result for version, result in found.items() if result.num_steps}


def cost(windows: Sequence[Window], blocks: Blocks) -> Cost:
    """Over these windows; not a number where the system tells no tokens, or this machine no seconds."""
    cpu_s, gpu_s = (
        _by_block([sum(seconds.values()) for seconds in spent], windows, blocks)
        for spent in ([window.cpu_s for window in windows], [window.gpu_s for window in windows])
    )
    tokens = _by_block([window.completion_tokens for window in windows], windows, blocks)
    accepted = _by_block([sum(window.of_domain(None).accepted) for window in windows], windows, blocks)

    def price(seconds: Floats, bought: Floats) -> Estimate:
        return bootstrap.ratio(blocks, seconds, bought) if seconds.sum() else bootstrap.NOTHING

    return Cost(
        cpu_s_per_token=price(cpu_s, tokens),
        cpu_s_per_accepted_token=price(cpu_s, accepted),
        gpu_s_per_token=price(gpu_s, tokens),
        gpu_s_per_accepted_token=price(gpu_s, accepted),
        cpu_s=_summed(window.cpu_s for window in windows),
        gpu_s=_summed(window.gpu_s for window in windows),
        num_tokens=float(tokens.sum()),
        num_accepted=float(accepted.sum()),
    )


def _summed(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for part in parts:
        for name, seconds in part.items():
            sums[name] += seconds
    return dict(sums)
