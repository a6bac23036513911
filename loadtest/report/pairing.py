"""Two runs prompt by prompt: hard and easy prompts cancel, so that small changes show."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from loadtest.detectors.regression import Comparison, exponential, verdict, widened
from loadtest.measures import bootstrap
from loadtest.measures.bootstrap import Blocks
from loadtest.measures.histogram import BlockHistogram, Floats, Ints, counts_by, sums_by
from loadtest.report.analysis import Analysis
from loadtest.statistics import Estimate

MIN_PAIRS = 30
"""Fewer pairs say less than all requests of both runs do."""
_QUANTILES = {
    f"{name}_p{percent}": (column, percent / 100)
    for name, column in (("ttft", "ttft_s"), ("tpot", "tpot_s"), ("e2e", "e2e_s"))
    for percent in (50, 99)
}
"""Measures that are a quantile over requests: column and share. Values are seconds."""
_AL = "acceptance_length"

Key = tuple[str, int]
"""Prompt id and turn."""
Statistic = Callable[[Floats, Blocks, Ints], Floats]
"""Of values in blocks: the statistic, and then that of each resample."""


def by_prompt(row: Comparison, before: Analysis, after: Analysis, level: float) -> Comparison:
    """The same comparison by pairs, of a measure that each request has a value of; else, or with too few pairs, as it was."""
    name = row.measure.name
    if name in _QUANTILES:
        column, share = _QUANTILES[name]
        return paired_comparison(row, pairs(before, after, column), partial(_quantiles, share=share), 1e3, level)
    if name == _AL:
        return paired_comparison(row, pairs(before, after, _AL), _means, 1.0, level)
    return row


@dataclass(frozen=True)
class Pairs:
    """Prompts and turns that both runs answered; the mean where a run sent one several times."""

    before: Floats
    after: Floats
    blocks: tuple[tuple[Blocks, Ints], ...]
    """For each run, its blocks of time and the block of each pair in it."""


def pairs(before: Analysis, after: Analysis, column: str) -> Pairs:
    first, second = _by_prompt(before, column), _by_prompt(after, column)
    both = [key for key in first if key in second]
    found = [np.asarray([run[key] for key in both]).reshape(-1, 2) for run in (first, second)]
    blocks = tuple(
        (analysis.blocks, analysis.blocks.of(rows[:, 1])) for analysis, rows in zip((before, after), found, strict=True)
    )
    return Pairs(found[0][:, 0], found[1][:, 0], blocks)


def _by_prompt(analysis: Analysis, column: str) -> Mapping[Key, tuple[float, float]]:
    """Value and intended time by prompt and turn."""
    table = analysis.table
    values, times_s = table[column], table["intended_at_s"]
    usable = analysis.measured & table.has_outcome("ok") & ~np.isnan(values)
    prompts = table.groups["prompt_id"]
    names = list(prompts.numbers)
    codes, turns = np.asarray(prompts.codes), table.turns
    gathered: dict[Key, list[tuple[float, float]]] = defaultdict(list)
    for row in np.flatnonzero(usable):
        gathered[names[codes[row]], int(turns[row])].append((float(values[row]), float(times_s[row])))
    return {key: (sum(value for value, _ in found) / len(found), found[0][1]) for key, found in gathered.items()}


def _quantiles(values: Floats, blocks: Blocks, block_of: Ints, share: float) -> Floats:
    """The quantile, and that of each resample."""
    histogram = BlockHistogram(values, block_of, blocks.number)
    return np.concatenate([[histogram.quantile(share)], histogram.resampled(blocks.weights, [share])[0]])


def _means(values: Floats, blocks: Blocks, block_of: Ints) -> Floats:
    """The mean, and that of each resample."""
    sums, numbers = sums_by(block_of, values, blocks.number), counts_by(block_of, blocks.number)
    return np.concatenate([[values.mean()], (blocks.weights @ sums) / (blocks.weights @ numbers)])


def paired_comparison(row: Comparison, found: Pairs, statistic: Statistic, scale: float, level: float) -> Comparison:
    """The same comparison by pairs; as it was where there are too few.

    Pairs are drawn again in blocks of time, once of one run and once of the other, and the wider interval counts: a busy spell
    of either run slows many prompts at once.
    """
    if len(found.before) < MIN_PAIRS or min(found.before.min(), found.after.min()) <= 0:
        return row
    estimates = []
    for blocks, block_of in found.blocks:
        before, after = (np.log(statistic(values, blocks, block_of)) for values in (found.before, found.after))
        estimates.append(bootstrap.around(after[0] - before[0], after[1:] - before[1:], blocks.number))
    wider = Estimate(
        estimates[0].value, min(estimate.low for estimate in estimates), max(estimate.high for estimate in estimates)
    )
    change = exponential(widened(wider, level))
    blocks, block_of = found.blocks[0]
    before_value, after_value = (scale * float(statistic(side, blocks, block_of)[0]) for side in (found.before, found.after))
    return Comparison(row.measure, before_value, after_value, change, len(found.before), verdict(row.measure, change))
