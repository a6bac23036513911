"""Figures of the run over time, everything on one clock: AL, throughput, TTFT; each position; and what the engines held."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from loadtest.detectors.domain_shift import RECOVERED_SHARE, Recovery
from loadtest.measures.series import Line
from loadtest.report.analysis import Analysis
from loadtest.report.markers import MAX_LABELS, explain_markers, mark
from loadtest.report.theme import DASHES, Palette, dress, legend, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_LINES = 6


def over_time(analysis: Analysis, palette: Palette) -> Figure:
    """AL, throughput and TTFT over time, with swaps, actions and changes of traffic marked through all of them."""
    found = analysis.series
    has_al = any(value is not None for value in found.acceptance_length)
    figure = new_figure(9.6, 7.0 if has_al else 4.8)
    panels = list(figure.subplots(3 if has_al else 2, 1, sharex=True, height_ratios=[1.25, 1, 1] if has_al else [1, 1]))
    middles = [start_s + found.window_s / 2 for start_s in found.start_s]
    if has_al:
        _acceptance_length(panels[0], analysis, middles, palette)
    flow, wait = panels[-2:]
    _line(flow, middles, found.tokens_per_s, palette, 0, "tokens/s")
    _failures(flow, analysis, middles, palette)
    flow.set_ylim(bottom=0)
    dress(flow, palette, "Output throughput", y="tokens/s")
    legend(flow, palette)
    _line(wait, middles, found.ttft_p50_ms, palette, 0, "p50")
    _line(wait, middles, found.ttft_p99_ms, palette, 1, "p99")
    wait.set_ylim(bottom=0)
    dress(wait, palette, "TTFT, by intended send time", x=f"seconds since the start (windows of {found.window_s:g} s)", y="ms")
    explain_markers(wait, analysis, palette)
    legend(wait, palette, columns=5)
    for number, axes in enumerate(panels):
        mark(axes, analysis, palette, with_labels=number == 0)
    wait.set_xlim(0, max(analysis.span.end_s, found.start_s[-1] + found.window_s))
    return figure


def _acceptance_length(axes: Axes, analysis: Analysis, middles: Sequence[float], palette: Palette) -> None:
    found = analysis.series
    by_domain = found.acceptance_length_by_domain
    if len(by_domain) > 1:
        axes.plot(middles, _gaps(found.acceptance_length), color=palette.muted, alpha=0.35, linewidth=5, label="all traffic")
        _lines(axes, middles, by_domain, palette)
    else:
        _line(axes, middles, found.acceptance_length, palette, 0)
    for recovery in analysis.recoveries:
        _recovery(axes, recovery, palette)
    low, high = axes.get_ylim()
    low = min(1.0, low)
    axes.set_ylim(low, high + 0.2 * (high - low))  # room for the names of the traffic
    dress(axes, palette, "Acceptance length (AL)", y="tokens per verify step")
    legend(axes, palette, columns=_MAX_LINES + 1)


def _recovery(axes: Axes, recovery: Recovery, palette: Palette) -> None:
    """From the shift to where 95 % of the new plateau is reached."""
    if not recovery.recovered_after_s or recovery.plateau is None:
        return
    level, at_s = RECOVERED_SHARE * recovery.plateau, recovery.shift.at_s
    axes.plot([at_s, at_s + recovery.recovered_after_s], [level, level], color=palette.ink, linewidth=1.3, zorder=4)
    axes.plot(at_s + recovery.recovered_after_s, level, "o", color=palette.ink, markersize=5, zorder=4)
    axes.annotate(
        f"95 % after {recovery.recovered_after_s:g} s", (at_s + recovery.recovered_after_s, level), xytext=(5, -13),
        textcoords="offset points", color=palette.ink, fontsize=8, zorder=4,
    )  # fmt: skip


def _failures(axes: Axes, analysis: Analysis, middles: Sequence[float], palette: Palette) -> None:
    """A cross under each window in which requests that were due in it failed, with their number."""
    number_at = {middle: number for middle, number in zip(middles, analysis.series.num_failed, strict=True) if number}
    if not number_at:
        return
    axes.plot(
        list(number_at), [0.0] * len(number_at), "x", color=palette.series[1], markersize=6, markeredgewidth=1.8, clip_on=False,
        label="requests failed", zorder=5,
    )  # fmt: skip
    if len(number_at) <= MAX_LABELS:
        for at_s, number in number_at.items():
            axes.annotate(
                str(number), (at_s, 0.0), xytext=(0, 6), textcoords="offset points", ha="center", color=palette.series[1],
                fontsize=8, zorder=5,
            )  # fmt: skip


def positions(analysis: Analysis, palette: Palette) -> Figure | None:
    """Share of verify steps whose proposal was accepted, a line for each position; None without verify steps."""
    found = analysis.series
    if not found.acceptance_by_position:
        return None
    figure = new_figure(9.6, 2.9)
    axes = figure.subplots()
    middles = [start_s + found.window_s / 2 for start_s in found.start_s]
    named = {f"position {position}": _percent(line) for position, line in found.acceptance_by_position.items()}
    _lines(axes, middles, named, palette)
    axes.set_ylim(0, 109)
    axes.set_yticks([0, 25, 50, 75, 100])
    title = (
        f"Acceptance by position, over time{'' if len(named) <= _MAX_LINES else f', the first {_MAX_LINES} of {len(named)}'}"
    )
    dress(axes, palette, title, x=f"seconds since the start (windows of {found.window_s:g} s)", y="% of verify steps")
    legend(axes, palette, columns=_MAX_LINES)
    mark(axes, analysis, palette, with_labels=False)
    axes.set_xlim(0, max(analysis.span.end_s, found.start_s[-1] + found.window_s))
    return figure


def engines(analysis: Analysis, palette: Palette) -> Figure | None:
    """KV use and requests of each engine; None where nothing was seen of them."""
    found = analysis.series
    if not any(value is not None for line in found.kv_usage.values() for value in line):
        return None
    figure = new_figure(9.6, 4.6)
    usage, requests = figure.subplots(2, 1, sharex=True)
    middles = [start_s + found.window_s / 2 for start_s in found.start_s]
    _lines(usage, middles, {name: _percent(line) for name, line in found.kv_usage.items()}, palette)
    usage.set_ylim(0, max(100.0 * _largest(found.kv_usage) * 1.25, 5.0))
    dress(usage, palette, "KV blocks in use", y="%")
    legend(usage, palette)
    _lines(requests, middles, found.num_running, palette)
    for number, (name, line) in enumerate(list(found.num_waiting.items())[:_MAX_LINES]):
        if any(line):
            _line(requests, middles, line, palette, number, f"{name}, waiting", linestyle=(0, (1, 1)))
    requests.set_ylim(bottom=0)
    dress(requests, palette, "Requests running", x="seconds since the start", y="requests")
    legend(requests, palette)
    for axes in (usage, requests):
        mark(axes, analysis, palette, with_labels=axes is usage)
    requests.set_xlim(0, found.start_s[-1] + found.window_s)
    return figure


def _lines(axes: Axes, x: Sequence[float], lines: Mapping[str, Line], palette: Palette) -> None:
    for number, (name, line) in enumerate(list(lines.items())[:_MAX_LINES]):
        _line(axes, x, line, palette, number, name)


def _line(
    axes: Axes, x: Sequence[float], y: Line, palette: Palette, number: int, label: str | None = None, **style: object
) -> None:
    colour, dashes = palette.series[number % len(palette.series)], DASHES[number % len(DASHES)]
    axes.plot(x, _gaps(y), label=label, **{"color": colour, "linestyle": dashes, "linewidth": 1.6, **style})  # type: ignore[arg-type]


def _gaps(line: Line) -> list[float]:
    """Nothing is drawn where nothing was measured."""
    return [float("nan") if value is None else value for value in line]


def _percent(line: Line) -> Line:
    return [None if value is None else 100.0 * value for value in line]


def _largest(lines: Mapping[str, Line]) -> float:
    return max((value for line in lines.values() for value in line if value is not None), default=0.0)
