"""What a set of requests came to: latencies, tokens per chunk, goodput, failures, acceptance."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from loadtest.measures import bootstrap
from loadtest.measures.bootstrap import Blocks
from loadtest.measures.histogram import BlockHistogram, Floats, Ints, sums_by
from loadtest.measures.table import GROUPS, Mask, RequestTable
from loadtest.statistics import Estimate

PERCENTILES = (50, 90, 95, 99)
OUTCOMES = ("ok", "failed", "truncated", "cancelled")


@dataclass(frozen=True)
class Distribution:
    """Of one latency, ms."""

    count: int
    mean: Estimate
    std: float
    max: float
    percentiles: dict[str, Estimate]
    """`p50`, `p90`, `p95`, `p99`."""


@dataclass(frozen=True)
class Summary:
    """Of one set of requests. Latencies are those of requests that were answered whole."""

    num_requests: int
    num_by_outcome: dict[str, int]
    ttft_ms: Distribution
    tpot_ms: Distribution
    itl_ms: Distribution
    e2e_ms: Distribution
    tokens_per_chunk: Estimate
    good_share: Estimate
    """Of requests whose client did not leave."""
    failed_share: Estimate
    """Failed or truncated, of requests whose client did not leave."""
    acceptance_length: Estimate
    """From the requests' own verify steps, where the engine tells them."""
    cached_share: Estimate
    """Prompt tokens that were not computed afresh, where the server says so."""
    num_prompt_tokens: int
    num_tokens: int


def summarize(table: RequestTable, chosen: Mask, blocks: Blocks) -> Summary:
    """Of the chosen requests."""
    block_of = blocks.of(table["intended_at_s"])
    ok = chosen & table.has_outcome("ok")
    stayed = chosen & ~table.has_outcome("cancelled")
    lost = chosen & table.has_outcome("failed", "truncated")
    gaps_s, rows = table.gaps(ok)

    def sums(values: Floats, rows: Mask) -> Floats:
        return sums_by(block_of[rows], values[rows], blocks.number)

    def latency(name: str) -> Distribution:
        usable = ok & ~np.isnan(table[name])
        return distribution(table[name][usable], block_of[usable], blocks)

    ones = np.ones(len(table))
    chunked = ok & (table["num_chunks"] > 0)
    verified = ok & ~np.isnan(table["num_verify_steps"])
    told = ok & ~np.isnan(table["num_cached_tokens"]) & ~np.isnan(table["num_prompt_tokens"])
    steps = sums(table["num_verify_steps"], verified)
    return Summary(
        num_requests=int(chosen.sum()),
        num_by_outcome={outcome: int((chosen & table.has_outcome(outcome)).sum()) for outcome in OUTCOMES},
        ttft_ms=latency("ttft_s"),
        tpot_ms=latency("tpot_s"),
        itl_ms=distribution(gaps_s, block_of[rows], blocks),
        e2e_ms=latency("e2e_s"),
        tokens_per_chunk=bootstrap.ratio(blocks, sums(table["num_tokens"], chunked), sums(table["num_chunks"], chunked)),
        good_share=bootstrap.share(blocks, sums(ones, chosen & table.is_good), sums(ones, stayed)),
        failed_share=bootstrap.share(blocks, sums(ones, lost), sums(ones, stayed)),
        acceptance_length=bootstrap.ratio(blocks, steps + sums(table["num_accepted"], verified), steps),
        cached_share=bootstrap.ratio(blocks, sums(table["num_cached_tokens"], told), sums(table["num_prompt_tokens"], told)),
        num_prompt_tokens=int(np.nansum(table["num_prompt_tokens"][ok])),
        num_tokens=int(table["num_tokens"][ok].sum()),
    )


def distribution(seconds: Floats, block_of: Ints, blocks: Blocks) -> Distribution:
    """Of these values, given in seconds, returned in ms."""
    if len(seconds) == 0:
        nan = float("nan")
        return Distribution(0, bootstrap.NOTHING, nan, nan, {f"p{number}": bootstrap.NOTHING for number in PERCENTILES})
    histogram = BlockHistogram(seconds, block_of, blocks.number)
    shares = [number / 100 for number in PERCENTILES]
    resampled = 1e3 * histogram.resampled(blocks.weights, shares)
    return Distribution(
        count=len(seconds),
        mean=bootstrap.mean(blocks, 1e3 * seconds, block_of),
        std=1e3 * float(seconds.std()),
        max=1e3 * float(seconds.max()),
        percentiles={
            f"p{number}": bootstrap.around(1e3 * histogram.quantile(share), row, blocks.number)
            for number, share, row in zip(PERCENTILES, shares, resampled, strict=True)
        },
    )


def by_group(table: RequestTable, chosen: Mask, blocks: Blocks) -> dict[str, dict[str, Summary]]:
    """The same for each lane, phase, domain, draft version, target version and KV path."""
    return {
        group: {
            word: summarize(table, chosen & mask, blocks) for word, mask in table.groups[group].masks() if (chosen & mask).any()
        }
        for group in GROUPS
    }
