"""`paceline bench compare A B`: is B better or worse than A? Prompt by prompt where both answered the same prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.detectors.losslessness import Losslessness, greedy, losslessness
from loadtest.detectors.regression import Comparison, independent, worse
from loadtest.measures import bootstrap
from loadtest.measures.headline import MEASURES
from loadtest.report import words
from loadtest.report.analysis import Analysis, analyse, within
from loadtest.report.pairing import by_prompt
from loadtest.report.result import comparisons, plain

_MAX_DIFFERENCES = 5
"""Of two scenarios that are named for people."""
_MAX_CHARACTERS = 60
"""Of one value."""


@dataclass(frozen=True)
class RunComparison:
    """Two runs, measure by measure."""

    rows: list[Comparison]
    losslessness: Losslessness
    why_invalid: dict[str, list[str]]
    """By directory, for runs that must not be believed."""
    scenario_differences: list[str]
    """By setting, what A and B were run with; empty where both are runs of one scenario."""


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
        rows.append(by_prompt(row, before, after, level))
    texts = [greedy(within(run.run.requests(), run.span), run.scenario) for run in (before, after)]
    invalid = {str(run.run.path): run.why_invalid for run in (before, after) if run.why_invalid}
    return RunComparison(rows, losslessness(*texts), invalid, _scenario_differences(before, after))


def lines(found: RunComparison, before_dir: Path, after_dir: Path) -> list[str]:
    """For people."""
    text = [f"A {before_dir}", f"B {after_dir}"]
    text += [f"NOT VALID: {path}: {'; '.join(reasons)}" for path, reasons in found.why_invalid.items()]
    text += _different_work(found.scenario_differences)
    text.append(f"{'':<24}{'A':>10}{'B':>10}  {'B against A':<30}{'pairs':>7}  verdict")
    for row in found.rows:
        scale, unit = row.measure.shown
        numbers = f"{words.number(scale * row.before):>10}{words.number(scale * row.after):>10}"
        name = f"{row.measure.title} {unit}".strip()
        text.append(f"{name:<24}{numbers}  {words.change(row):<30}{row.num_pairs or '–':>7}  {row.verdict}")
    return [*text, _texts(found.losslessness)]


def _scenario_differences(before: Analysis, after: Analysis) -> list[str]:
    return list(_differences("", *(run.scenario.model_dump(mode="json") for run in (before, after))))


def _differences(name: str, before: Any, after: Any) -> Iterator[str]:
    if before == after:
        return
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in dict.fromkeys((*before, *after)):
            yield from _differences(f"{name}.{key}" if name else str(key), before.get(key), after.get(key))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, pair in enumerate(zip(before, after, strict=True)):
            yield from _differences(f"{name}[{number}]", *pair)
    else:
        yield f"{name} is {_shown(before)} in A and {_shown(after)} in B"


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}…"


def _different_work(differences: list[str]) -> list[str]:
    if not differences:
        return []
    rest = len(differences) - _MAX_DIFFERENCES
    more = [f"  and {rest} more"] if rest > 0 else []
    head = "DIFFERENT SCENARIOS: A and B did different work, so what follows is no effect of the system alone"
    return [head, *(f"  {difference}" for difference in differences[:_MAX_DIFFERENCES]), *more]


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
        "scenario_differences": found.scenario_differences,
    }
