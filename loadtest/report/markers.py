"""Markers through every figure over time: what was cut, what was swapped, how the traffic changed, what else was done."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadtest.records import COMMITTED, ActionRecord, Swap
from loadtest.report.analysis import Analysis
from loadtest.report.theme import Palette

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_LABELS = 25
"""More labels than that cover each other and what they explain."""
_SWAP_DASHES = (0, (2, 2))
_ACTION_DASHES = (0, (6, 2))
_SWAP_HEIGHT, _ACTION_HEIGHT, _TRAFFIC_HEIGHT = 0.03, 0.8, 0.91
"""Of labels, as shares of the axes."""


def mark(axes: Axes, analysis: Analysis, palette: Palette, *, with_labels: bool) -> None:
    """Draw all of them; the labels belong to one of several axes that share their clock."""
    _mark_cuts(axes, analysis, palette)
    _mark_swaps(axes, committed(analysis), palette, with_labels=with_labels)
    _mark_shifts(axes, analysis, palette, with_labels=with_labels)
    for action in other_actions(analysis):
        axes.axvline(action.at_s, color=palette.series[1], linewidth=1.2, linestyle=_ACTION_DASHES, zorder=2)
        if with_labels:
            _note(axes, action.at_s, _ACTION_HEIGHT, f"{action.do} {action.process}".strip(), palette.series[1])


def explain_markers(axes: Axes, analysis: Analysis, palette: Palette) -> None:
    """Entries of the legend for the markers there are."""
    entries = (
        ("draft swapped, to version", palette.series[3], _SWAP_DASHES, committed(analysis)),
        ("traffic changes", palette.ink, "-", analysis.recoveries),
        ("action", palette.series[1], _ACTION_DASHES, other_actions(analysis)),
    )
    for label, colour, dashes, markers in entries:
        if markers:
            axes.plot([], [], color=colour, linestyle=dashes, linewidth=1.4, label=label)


def committed(analysis: Analysis) -> list[Swap]:
    """Swaps that took place, warm-up and cool-down included."""
    return [swap for swap in analysis.timeline.swaps if swap.outcome == COMMITTED]


def other_actions(analysis: Analysis) -> list[ActionRecord]:
    """What the scenario did beside swaps, which have markers of their own."""
    actions = analysis.run.record.actions if analysis.run.record else []
    return [action for action in actions if action.do not in ("swap", "rollback")]


def _mark_cuts(axes: Axes, analysis: Analysis, palette: Palette) -> None:
    span, window_s = analysis.span, analysis.series.window_s
    for start_s, end_s in ((0.0, span.start_s), (span.end_s, analysis.series.start_s[-1] + window_s)):
        if end_s - start_s > window_s / 2:
            axes.axvspan(start_s, end_s, facecolor=palette.grid, alpha=0.45, linewidth=0, zorder=0)


def _mark_swaps(axes: Axes, swaps: list[Swap], palette: Palette, *, with_labels: bool) -> None:
    for swap in swaps:
        at_s = swap.at_s + swap.duration_s
        axes.axvline(at_s, color=palette.series[3], linewidth=1.0, linestyle=_SWAP_DASHES, zorder=2)
        if with_labels and len(swaps) <= MAX_LABELS:
            _note(axes, at_s, _SWAP_HEIGHT, str(swap.version), palette.series[3])


def _mark_shifts(axes: Axes, analysis: Analysis, palette: Palette, *, with_labels: bool) -> None:
    shifts = [recovery.shift for recovery in analysis.recoveries]
    if with_labels and shifts and shifts[0].at_s > 0:
        _note(axes, 0.0, _TRAFFIC_HEIGHT, shifts[0].before, palette.ink)
    for shift in shifts:
        is_gradual = shift.ends_at_s > shift.at_s
        axes.axvline(shift.at_s, color=palette.ink, linewidth=1.6, zorder=2)
        if is_gradual:
            axes.axvspan(shift.at_s, shift.ends_at_s, facecolor=palette.series[4], alpha=0.15, linewidth=0, zorder=0)
        if with_labels:
            text = f"{shift.before} → {shift.after}" if is_gradual else shift.after
            _note(axes, shift.at_s, _TRAFFIC_HEIGHT, text, palette.ink)


def _note(axes: Axes, at_s: float, height: float, text: str, colour: str) -> None:
    """Right of a marker."""
    axes.annotate(
        text, (at_s, height), xycoords=("data", "axes fraction"), xytext=(3, 0), textcoords="offset points", color=colour,
        fontsize=8, va="bottom",
    )  # fmt: skip
