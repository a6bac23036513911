"""`paceline bench compare A B`: is B better or worse than A? Prompt by prompt where both answered the same prompts."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loadtest.detectors.losslessness import Losslessness, greedy, losslessness
from loadtest.detectors.regression import Comparison, independent, verdict, worse
from loadtest.measures import bootstrap
from loadtest.measures.headline import MEASURES
from loadtest.measures.histogram import Floats
from loadtest.report import words
from loadtest.report.analysis import Analysis, analyse, within
from loadtest.report.result import comparisons, plain


def p50(values: Floats) -> float:
    return float(np.quantile(values, 0.5))


def p99(values: Floats) -> float:
    return float(np.quantile(values, 0.99))


MIN_PAIRS = 30
"""Fewer pairs say less than all requests of both runs do."""
_PAIRED: dict[str, tuple[str, float, Callable[[Floats], float]]] = {
    "ttft_p50": ("ttft_s", 1e3, p50),
    "ttft_p99": ("ttft_s", 1e3, p99),
    "tpot_p50": ("tpot_s", 1e3, p50),
    "tpot_p99": ("tpot_s", 1e3, p99),
    "e2e_p50": ("e2e_s", 1e3, p50),
    "e2e_p99": ("e2e_s", 1e3, p99),
    "acceptance_length": ("acceptance_length", 1.0, np.mean),
}
"""Measures that each request has a value of: column, scale and statistic."""

Key = tuple[str, int]
"""Prompt id and turn."""


@dataclass(frozen=True)
class RunComparison:
    """Two runs, measure by measure."""

    rows: list[Comparison]
    losslessness: Losslessness
    why_invalid: dict[str, list[str]]
    """By directory, for runs that must not be believed."""


def compare(
    before_dir: Path, after_dir: Path, say: Callable[[str], None], *, as_json: bool, fail_on_regression: bool, lossless: bool
) -> int:
    """Returns 0; 1 where a run is invalid, where asked for if B is worse, and where asked for if greedy texts are not equal."""
    found = compare_runs(analyse(before_dir), analyse(after_dir))
    if as_json:
        say(json.dumps(as_plain(found), indent=2))
    else:
        for line in lines(found, before_dir, after_dir):
            say(line)
    is_regression = fail_on_regression and bool(worse(found.rows))
    is_lossy = lossless and found.losslessness.verdict != "equal"
    return int(bool(found.why_invalid) or is_regression or is_lossy)


def compare_runs(before: Analysis, after: Analysis) -> RunComparison:
    """Each measure that both runs have."""
    names = [measure for measure in MEASURES if measure.name in before.headline and measure.name in after.headline]
    level = bootstrap.level_for(len(names))
    rows = []
    for measure in names:
        row = independent(measure, before.headline[measure.name], after.headline[measure.name], level)
        if measure.name in _PAIRED:
            row = _paired(row, *pairs(before, after, _PAIRED[measure.name][0]), level)
        rows.append(row)
    texts = [greedy(within(run.run.requests(), run.span), run.scenario) for run in (before, after)]
    invalid = {str(run.run.path): run.why_invalid for run in (before, after) if run.why_invalid}
    return RunComparison(rows, losslessness(*texts), invalid)


def pairs(before: Analysis, after: Analysis, column: str) -> tuple[Floats, Floats]:
    """Values of prompts and turns that both runs answered; the mean where a run sent one several times."""
    first, second = _by_prompt(before, column), _by_prompt(after, column)
    both = [key for key in first if key in second]
    return np.asarray([first[key] for key in both]), np.asarray([second[key] for key in both])


def _by_prompt(analysis: Analysis, column: str) -> Mapping[Key, float]:
    table = analysis.table
    values = table[column]
    usable = analysis.measured & table.has_outcome("ok") & ~np.isnan(values)
    prompts = table.groups["prompt_id"]
    names = list(prompts.numbers)
    codes, turns = np.asarray(prompts.codes), table.turns
    gathered: dict[Key, list[float]] = defaultdict(list)
    for row in np.flatnonzero(usable):
        gathered[names[codes[row]], int(turns[row])].append(float(values[row]))
    return {key: sum(found) / len(found) for key, found in gathered.items()}


def _paired(row: Comparison, before: Floats, after: Floats, level: float) -> Comparison:
    """The same comparison with prompts as pairs; as it was where there are too few."""
    if len(before) < MIN_PAIRS:
        return row
    _, scale, statistic = _PAIRED[row.measure.name]
    if statistic(before) <= 0:
        return row
    change = bootstrap.paired_ratio(after, before, statistic, level)
    values = (scale * float(statistic(before)), scale * float(statistic(after)))
    return Comparison(row.measure, *values, change, len(before), verdict(row.measure, change))


def lines(found: RunComparison, before_dir: Path, after_dir: Path) -> list[str]:
    """For people."""
    text = [f"A {before_dir}", f"B {after_dir}"]
    text += [f"NOT VALID: {path}: {'; '.join(reasons)}" for path, reasons in found.why_invalid.items()]
    text.append(f"{'':<24}{'A':>10}{'B':>10}  {'B against A':<30}{'pairs':>7}  verdict")
    for row in found.rows:
        scale = 100.0 if row.measure.by == "difference" else 1.0
        unit = "%" if row.measure.by == "difference" else row.measure.unit
        numbers = f"{words.number(scale * row.before):>10}{words.number(scale * row.after):>10}"
        name = f"{row.measure.title} {unit}".strip()
        text.append(f"{name:<24}{numbers}  {words.change(row):<30}{row.num_pairs or '–':>7}  {row.verdict}")
    return [*text, _texts(found.losslessness)]


def _texts(found: Losslessness) -> str:
    if found.verdict == "undecided":
        return "greedy texts: none to compare"
    text = f"greedy texts: {found.num_compared - found.num_different} of {found.num_compared} equal"
    if found.differences:
        first = found.differences[0]
        text += f"; {first.prompt_id} turn {first.turn} differs at character {first.first_character}: {first.reference!r}, {first.found!r}"
    return text + (f"; {found.num_unstable} left out because A answered them in several ways" if found.num_unstable else "")


def as_plain(found: RunComparison) -> dict[str, Any]:
    """For machines."""
    return {
        "rows": comparisons(found.rows),
        "worse": worse(found.rows),
        "losslessness": {**plain(found.losslessness), "verdict": found.losslessness.verdict},
        "why_invalid": found.why_invalid,
    }
