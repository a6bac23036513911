"""Figures of the learning benchmark: AL and speed along the work, and speed-ups by phase."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from loadtest.learning.benchmark import NONE, OURS
from loadtest.learning.course import Axis, Course
from loadtest.report.theme import DASHES, Palette, dress, legend, new_figure
from loadtest.statistics import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SWAP_DASHES = (0, (2, 2))
_ROOM = 1.2
"""Above the lines, for the names of phases."""
_MARKERS = "osD^vPX*<"
"""There may be more arms than colours."""


def along_work(courses: Mapping[str, Course], axis: Axis, palette: Palette) -> Figure:
    """AL and speed over completion tokens, a line for each arm; phases, and the swaps of the arm that is ours."""
    figure = new_figure(9.6, 6.4)
    lengths, speeds = figure.subplots(2, 1, sharex=True)
    for number, (name, found) in enumerate(courses.items()):
        style = _style(number, palette, is_ours=name == OURS)
        if any(value is not None for value in found.acceptance_length):
            values = [float("nan") if value is None else value for value in found.acceptance_length]
            lengths.plot(found.at, values, label=name, **style)
        speeds.plot(found.at, found.tokens_per_s, label=name, **style)
    lengths.set_ylim(1.0, max(_ROOM * (lengths.get_ylim()[1] - 1.0) + 1.0, 1.2))
    speeds.set_ylim(0.0, _ROOM * speeds.get_ylim()[1])
    dress(lengths, palette, "Acceptance length (AL)", y="tokens per verify step")
    dress(speeds, palette, "Speed of a stream", x="completion tokens since the start of the work", y="tokens/s")
    legend(lengths, palette, columns=7)
    legend(speeds, palette, columns=7)
    for axes in (lengths, speeds):
        _phases(axes, axis, palette, with_names=axes is lengths)
        for at in courses[OURS].swaps_at if OURS in courses else ():
            axes.axvline(at, color=palette.series[3], linewidth=1.0, linestyle=_SWAP_DASHES, zorder=2)
    speeds.set_xlim(0, axis.length or 1.0)
    return figure


def by_phase(speed_ups: Mapping[str, Mapping[str, Estimate]], palette: Palette) -> Figure | None:
    """Speed-up over no speculation by arm and phase, with intervals; None where nothing is compared with it.

    An arm has the colour that it has along the work.
    """
    colours = {name: _colour(number, palette) for number, name in enumerate(speed_ups)}
    arms = {name: found for name, found in speed_ups.items() if found and name != NONE}
    phases = list(dict.fromkeys(phase for found in arms.values() for phase in found))
    if not phases:
        return None
    figure = new_figure(9.6, 3.4)
    axes = figure.subplots()
    step = 0.8 / len(arms)
    for number, (name, found) in enumerate(arms.items()):
        places = [phases.index(phase) - 0.4 + (number + 0.5) * step for phase in found]
        values = [estimate.value for estimate in found.values()]
        below = [max(estimate.value - estimate.low, 0.0) for estimate in found.values()]
        above = [max(estimate.high - estimate.value, 0.0) for estimate in found.values()]
        marker = _MARKERS[number % len(_MARKERS)]
        axes.errorbar(places, values, yerr=[below, above], fmt=marker, color=colours[name], capsize=3, markersize=5, label=name)
    axes.axhline(1.0, color=palette.ink, linewidth=1.2, zorder=1)
    axes.set_xticks(range(len(phases)), phases)
    dress(axes, palette, "Speed over no speculation, the same requests", y="x")
    legend(axes, palette, columns=7)
    return figure


def _colour(number: int, palette: Palette) -> str:
    return palette.series[number % len(palette.series)]


def _style(number: int, palette: Palette, *, is_ours: bool) -> dict[str, object]:
    return {
        "color": _colour(number, palette),
        "linestyle": DASHES[number % len(DASHES)],
        "linewidth": 2.4 if is_ours else 1.5,
    }


def _phases(axes: Axes, axis: Axis, palette: Palette, *, with_names: bool) -> None:
    for name, (start, _) in axis.phases.items():
        axes.axvline(start, color=palette.ink, linewidth=1.4, zorder=2)
        if with_names:
            axes.annotate(
                name, (start, 0.92), xycoords=("data", "axes fraction"), xytext=(3, 0), textcoords="offset points",
                color=palette.ink, fontsize=8, va="bottom",
            )  # fmt: skip
