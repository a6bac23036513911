"""The report of a learning benchmark: learning.json, learning.html and the figures, from whatever arms have run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

import msgspec

from loadtest.bars.command import verdict
from loadtest.bars.registry import Measured
from loadtest.learning import figures, measures
from loadtest.learning.answers import LEARNER, ArmRun
from loadtest.learning.benchmark import NONE, OURS
from loadtest.learning.course import Course, axis, course
from loadtest.learning.remarks import remarks
from loadtest.learning.verdicts import Results, bars, measured, shown
from loadtest.report import theme
from loadtest.report.page import document, scroll, table, wide
from loadtest.report.result import plain, write
from loadtest.report.words import number
from loadtest.statistics import Estimate

JSON_FILE = "learning.json"
HTML_FILE = "learning.html"
SCHEMA_VERSION = 1
_ALONG, _BY_PHASE = "along_work", "by_phase"
_CAPTION = (
    "The same requests in the same order for every arm. Solid vertical lines: a phase begins. Dotted: a draft was swapped in "
    f"by {OURS}."
)


def report(results: Results, unavailable: Mapping[str, str], directory: Path, say: Callable[[str], None]) -> None:
    """Write everything and say what came of the bars; raises MissingMatplotlib."""
    theme.require_matplotlib()
    arms = results.arms
    found = measured(results)
    along = axis(list(arms.values()))
    courses = {name: course(run, along) for name, run in arms.items()}
    speed_ups = {name: by_phase(run, arms[NONE]) for name, run in arms.items()} if NONE in arms else {}
    drawings = _draw(courses, along, speed_ups, directory)
    write(directory / JSON_FILE, plain(_whole(results, unavailable, found, courses, speed_ups)))
    (directory / HTML_FILE).write_text(_page(results, unavailable, found, speed_ups, drawings))
    for bar in bars():
        say(verdict(bar, found[_short(bar.name)]))
    for line in remarks(results, unavailable):
        say(line)
    say(
        f"written: {directory / JSON_FILE}, {directory / HTML_FILE}; one arm more closely: paceline bench report {directory}/ARM"
    )


def by_phase(run: ArmRun, other: ArmRun) -> dict[str, Estimate]:
    """Speed over another arm, by the phases that both did."""
    found = {phase: measures.pairs(run, other, run.of_phase(phase)) for phase in run.phases}
    return {phase: measures.speed_up(paired) for phase, paired in found.items() if paired}


def _draw(courses: Mapping[str, Course], along: Any, speed_ups: Mapping[str, Mapping[str, Estimate]], directory: Path) -> dict[str, str]:  # fmt: skip
    drawings: dict[str, str] = {}
    for name, label, draw in (
        (_ALONG, "AL and speed along the work", lambda palette: figures.along_work(courses, along, palette)),
        (_BY_PHASE, "speed-up by phase", lambda palette: figures.by_phase(speed_ups, palette)),
    ):
        on_white, named = draw(theme.ON_WHITE), draw(theme.NAMES)
        if on_white is not None and named is not None:
            (directory / f"{name}.png").write_bytes(theme.as_png(on_white))
            drawings[name] = theme.as_svg(named, label)
    return drawings


def _whole(
    results: Results,
    unavailable: Mapping[str, str],
    found: Mapping[str, Measured],
    courses: Mapping[str, Course],
    speed_ups: Mapping[str, Mapping[str, Estimate]],
) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "benchmark": results.benchmark.model_dump(mode="json"),
        "unavailable": dict(unavailable),
        "remarks": remarks(results, unavailable),
        "bars": [
            {"name": bar.name, "measured": found[_short(bar.name)].value, "bar": bar.bar, "comparison": bar.comparison,
             "unit": bar.unit, "is_met": bar.is_met(found[_short(bar.name)].value), "detail": found[_short(bar.name)].detail}
            for bar in bars()
        ],
        "arms": {name: _arm(run, courses[name], speed_ups.get(name, {})) for name, run in results.arms.items()},
    }  # fmt: skip


def _arm(run: ArmRun, along: Course, speed_ups: Mapping[str, Estimate]) -> dict[str, Any]:
    return {
        "run": msgspec.to_builtins(run.record),
        "swaps": msgspec.to_builtins(run.swaps),
        "cpu_s": dict(run.cpu_s),
        "phases": {
            phase: {
                "span_s": asdict(run.span(phase)),
                "completion_tokens": sum(answer.num_tokens for answer in run.of_phase(phase)),
                "acceptance_length": measures.acceptance_length(run.of_phase(phase)),
                "acceptance_length_at_end": measures.acceptance_length(measures.last_part(run.of_phase(phase))),
                "acceptance_length_unseen": measures.acceptance_length(one for one in run.of_phase(phase) if one.is_unseen),
                "speed_up": speed_ups.get(phase),
            }
            for phase in run.phases
        },
        "course": along,
    }


def _page(
    results: Results,
    unavailable: Mapping[str, str],
    found: Mapping[str, Measured],
    speed_ups: Mapping[str, Mapping[str, Estimate]],
    drawings: Mapping[str, str],
) -> str:
    name = escape(results.benchmark.name)
    parts = [
        f"<h1>{name}</h1><p class=what>{escape(results.benchmark.what)}</p>",
        scroll(_bars(found)),
        wide(drawings.get(_ALONG), _CAPTION),
        wide(drawings.get(_BY_PHASE), "Bars: 95 % intervals."),
        "<h2>Arms</h2>",
        scroll(_arms(results.arms)),
        *[f"<p><small>{escape(line)}</small></p>" for line in remarks(results, unavailable)],
        "<h2>Phases</h2>",
        scroll(_phases(results.arms, speed_ups)),
    ]
    return document(name, parts)


def _bars(found: Mapping[str, Measured]) -> str:
    signs = {"at_least": "≥", "at_most": "≤", "equals": "="}
    rows = []
    for bar in bars():
        one = found[_short(bar.name)]
        word = "not measured" if one.value is None else "met" if bar.is_met(one.value) else "falls short"
        details = "; ".join(f"{key} {value}" for key, value in one.detail.items())
        rows.append((bar.name, number(one.value), f"{signs[bar.comparison]} {bar.bar:g} {bar.unit}", word, details))
    return table(("", "measured", "bar", "", "detail"), rows)


def _arms(arms: Mapping[str, ArmRun]) -> str:
    """Arms take part in different phases, so that only what is paired can be compared between rows."""
    head = (
        "",
        "requests",
        "failed",
        "completion tokens",
        f"speed over {NONE}, shared requests",
        "swaps",
        "learner CPU s",
        "seconds",
    )
    return table(head, [_arm_row(name, run, arms.get(NONE)) for name, run in arms.items()])


def _arm_row(name: str, run: ArmRun, none: ArmRun | None) -> Sequence[str]:
    answers = list(run.answers.values())
    paired = measures.pairs(run, none) if none is not None else []
    return (
        name,
        str(len(answers)),
        str(sum(not one.is_ok for one in answers)),
        f"{sum(one.num_tokens for one in answers):,}",
        shown(measures.speed_up(paired)) if paired else number(None),
        str(len(run.swaps)),
        number(run.cpu_s.get(LEARNER)),
        number(run.record.duration_s if run.record else None),
    )


def _phases(arms: Mapping[str, ArmRun], speed_ups: Mapping[str, Mapping[str, Estimate]]) -> str:
    rows = []
    for name, run in arms.items():
        for phase in run.phases:
            answers = run.of_phase(phase)
            estimate = speed_ups.get(name, {}).get(phase)
            rows.append(
                (
                    f"{name}, {phase}",
                    number(measures.acceptance_length(answers)),
                    number(measures.acceptance_length(measures.last_part(answers))),
                    number(measures.acceptance_length(one for one in answers if one.is_unseen)),
                    shown(estimate) if estimate else number(None),
                )
            )
    return table(("", "AL", "AL at its end", "AL, unseen prompts", f"speed over {NONE}"), rows)


def _short(name: str) -> str:
    return name.split(".", 1)[1]
