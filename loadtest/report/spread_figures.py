"""Figures of distributions and of groups: how latencies spread, what each domain and each position came to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from loadtest.measures.histogram import Floats
from loadtest.report.analysis import Analysis
from loadtest.report.theme import DASHES, Palette, dress, legend, new_figure
from loadtest.statistics import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NUM_POINTS = 100
_MAX_GROUPS = 6
_LONG_TAIL = 8.0
"""Longest value over the median from which on a linear axis shows nothing but the tail."""
_WIDE = 0.6
"""Shortest value over the longest from which on an axis from 0 shows nothing but a step."""
_NARROW = 1e-3
"""Longest less shortest, over the longest, below which an axis around them shows nothing but rounding."""


def latencies(analysis: Analysis, palette: Palette) -> Figure:
    """Cumulative distribution of each latency, a line for each lane."""
    figure = new_figure(7.4, 5.6)
    slo = analysis.scenario.slo
    table, ok = analysis.table, analysis.measured & analysis.table.has_outcome("ok")
    lanes = list(table.groups["lane"].masks())[:_MAX_GROUPS]
    panels = (
        ("TTFT", "ttft_s", slo.ttft_ms), ("TPOT", "tpot_s", slo.tpot_ms), ("ITL, between chunks", None, None),
        ("E2E", "e2e_s", slo.e2e_ms),
    )  # fmt: skip
    for axes, (title, column, limit_ms) in zip(figure.subplots(2, 2).flat, panels, strict=True):
        values_s = {lane: table.gaps(ok & mask)[0] if column is None else table[column][ok & mask] for lane, mask in lanes}
        for number, (lane, seconds) in enumerate(values_s.items()):
            _cumulative(axes, seconds[~np.isnan(seconds)], palette, number, lane)
        _fit(axes, np.concatenate([*values_s.values(), np.empty(0)]))
        if limit_ms is not None:
            axes.axvline(limit_ms, color=palette.ink, linewidth=1.2, linestyle=(0, (4, 2)))
            axes.annotate(
                "objective", (limit_ms, 0.04), xytext=(-3, 0), textcoords="offset points", color=palette.ink, fontsize=8,
                ha="right",
            )  # fmt: skip
        axes.set_ylim(0, 1.01)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 0.95], ["0", "25", "50", "75", "95"])
        dress(axes, palette, title, x="ms", y="% of requests" if column else "% of waits")
        if column == "ttft_s":
            legend(axes, palette)
    return figure


def _cumulative(axes: Axes, seconds: Floats, palette: Palette, number: int, label: str) -> None:
    if len(seconds) == 0:
        return
    # The upper end is where the news is, so the points are closest there.
    tail = 1.0 - np.geomspace(0.1, 1.0 / max(len(seconds), 10), _NUM_POINTS // 2)
    shares = np.concatenate([np.linspace(0.0, 0.9, _NUM_POINTS), tail, [1.0]])
    axes.plot(
        1e3 * np.quantile(seconds, shares), shares, label=label, linewidth=1.8,
        color=palette.series[number % len(palette.series)], linestyle=DASHES[number % len(DASHES)],
    )  # fmt: skip


def _fit(axes: Axes, seconds: Floats) -> None:
    """A scale on which the bulk of these values can be seen."""
    if np.all(np.isnan(seconds)):
        return
    least, most = np.nanmin(seconds), np.nanmax(seconds)
    if most > _LONG_TAIL * np.nanmedian(seconds) > 0:
        axes.set_xscale("log")
    elif least < _WIDE * most or most - least < _NARROW * most:
        axes.set_xlim(left=0)


def domains(analysis: Analysis, palette: Palette) -> Figure | None:
    """AL, tokens per chunk and latencies by domain, with intervals; None of nothing."""
    groups = dict(sorted(analysis.groups["domain"].items())[:_MAX_GROUPS])
    if not groups:
        return None
    lengths = {domain: found.acceptance_length for domain, found in analysis.acceptance_by_domain.items() if domain in groups}
    bars: list[tuple[str, str, Mapping[str, Estimate]]] = [
        ("AL", "tokens per verify step", lengths or {name: found.acceptance_length for name, found in groups.items()}),
        ("Tokens per chunk", "tokens", {name: found.tokens_per_chunk for name, found in groups.items()}),
        ("TPOT p50", "ms", {name: found.tpot_ms.percentiles["p50"] for name, found in groups.items()}),
        ("TTFT p50", "ms", {name: found.ttft_ms.percentiles["p50"] for name, found in groups.items()}),
        ("E2E p50", "ms", {name: found.e2e_ms.percentiles["p50"] for name, found in groups.items()}),
    ]
    shown = [bar for bar in bars if any(estimate.value == estimate.value for estimate in bar[2].values())][:4]
    if not shown:
        return None
    figure = new_figure(7.4, 1.9 + 0.75 * len(groups))
    grid = figure.subplots(2, 2).flat
    for axes, (title, unit, values) in zip(grid, shown, strict=False):
        _bars(axes, {name: values[name] for name in groups if name in values}, list(groups), palette)
        dress(axes, palette, title, x=unit)
        axes.grid(visible=False, axis="y")
    for axes in list(figure.axes)[len(shown) :]:
        axes.set_visible(False)
    return figure


def _bars(axes: Axes, values: Mapping[str, Estimate], order: list[str], palette: Palette) -> None:
    """Horizontal, so that names stay readable; the whisker is the interval, the number stands right of it."""
    axes.set_yticks(range(len(order)), order)
    axes.set_ylim(len(order) - 0.4, -0.6)
    for name, estimate in values.items():
        if estimate.value != estimate.value:
            continue
        row = order.index(name)
        axes.barh(row, estimate.value, height=0.62, color=palette.series[row % len(palette.series)])
        end = estimate.value
        if estimate.low == estimate.low:
            axes.plot([estimate.low, estimate.high], [row, row], color=palette.ink, linewidth=1.4)
            end = max(end, estimate.high)
        axes.annotate(
            f"{estimate.value:.3g}", (end, row), xytext=(4, 0), textcoords="offset points", va="center", color=palette.ink,
            fontsize=8.5,
        )  # fmt: skip
    axes.margins(x=0.16)
    axes.set_xlim(left=0)


def positions(analysis: Analysis, palette: Palette) -> Figure | None:
    """Share of verify steps whose proposal was accepted, by position and domain; None without verify steps."""
    lines = {domain or "all": found.by_position for domain, found in analysis.acceptance_by_domain.items()}
    lines = dict(list({"all traffic": analysis.acceptance.by_position, **lines}.items())[: _MAX_GROUPS + 1])
    if not analysis.acceptance.by_position:
        return None
    if len(lines) == 2:
        del lines["all traffic"]
    figure = new_figure(7.4, 3.2)
    axes = figure.subplots()
    width = 0.8 / len(lines)
    for number, (name, shares) in enumerate(lines.items()):
        at = [position + (number - (len(lines) - 1) / 2) * width for position in range(1, len(shares) + 1)]
        colour = palette.muted if name == "all traffic" else palette.series[(number - 1) % len(palette.series)]
        axes.bar(at, [100 * share for share in shares], width=0.92 * width, color=colour, label=name)
        for x, share in zip(at, shares, strict=True):
            axes.annotate(
                f"{100 * share:.0f}", (x, 100 * share), xytext=(0, 2), textcoords="offset points", ha="center",
                color=palette.muted, fontsize=8,
            )  # fmt: skip
    axes.set_xticks(range(1, max(map(len, lines.values())) + 1))
    axes.set_ylim(0, 109)
    axes.set_yticks([0, 25, 50, 75, 100])
    dress(axes, palette, "Acceptance by position", x="position of the proposal", y="% of verify steps")
    axes.grid(visible=False, axis="x")
    legend(axes, palette)
    return figure
