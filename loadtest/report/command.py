"""`paceline bench report`: measure what a run left, write report.json, report.html and the figures, say what happened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from loadtest.detectors.regression import Comparison, regression, worse
from loadtest.measures.run_directory import RunDirectoryError
from loadtest.report import result, spread_figures, theme, time_figures, words
from loadtest.report.analysis import Analysis, analyse
from loadtest.report.page import page
from loadtest.run.output import OutputError

HTML_FILE = "report.html"

_FIGURES = {
    "over_time": (time_figures.over_time, "AL, throughput and TTFT over time"),
    "positions_over_time": (time_figures.positions, "acceptance by position over time"),
    "latencies": (spread_figures.latencies, "cumulative distributions of latencies"),
    "domains": (spread_figures.domains, "AL and latencies by domain"),
    "positions": (spread_figures.positions, "acceptance by position"),
    "engines": (time_figures.engines, "KV use and requests of the engines"),
}


def report(directory: Path, baseline: Path | None, say: Callable[[str], None]) -> int:
    """Returns 0; 1 for a run that must not be believed, or that is worse than `baseline` (a report.json or its directory)."""
    theme.require_matplotlib()
    before = result.read_measures(_file_of(baseline)) if baseline else None
    analysis = analyse(directory)
    comparisons = regression(before, analysis.headline) if before else []
    try:
        write(analysis, comparisons)
    except OSError as error:
        raise OutputError(
            f"cannot write the report to {directory}: {error}; make room, or copy the run where there is"
        ) from error
    for line in [*words.sentences(analysis), *words.regression(comparisons)]:
        say(line)
    say(f"written: {directory / result.FILE}, {directory / HTML_FILE}")
    return int(bool(analysis.why_invalid or worse(comparisons)))


def write(analysis: Analysis, comparisons: list[Comparison]) -> None:
    """All files of the report, into the run's directory."""
    directory = analysis.run.path
    drawings: dict[str, str] = {}
    for name, (draw, label) in _FIGURES.items():
        on_white, named = draw(analysis, theme.ON_WHITE), draw(analysis, theme.NAMES)
        if on_white is not None and named is not None:
            (directory / f"{name}.png").write_bytes(theme.as_png(on_white))
            drawings[name] = theme.as_svg(named, label)
    (directory / HTML_FILE).write_text(page(analysis, drawings, comparisons))
    whole = result.result(analysis)
    whole["paceline"]["against_baseline"] = result.comparisons(comparisons)
    result.write(directory / result.FILE, whole)
    result.write(directory / result.SUMMARY_FILE, result.summary(whole))


def _file_of(baseline: Path) -> Path:
    """Raises RunDirectoryError where there is no report."""
    if not baseline.is_dir():
        return baseline
    if not (baseline / result.FILE).is_file():
        raise RunDirectoryError(
            f"{baseline} holds no {result.FILE} to compare with; `paceline bench report {baseline}` makes it of a run"
        )
    return baseline / result.FILE
