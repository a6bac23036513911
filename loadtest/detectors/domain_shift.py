"""Domain shift: how far AL falls when the traffic changes, and how long the draft takes to learn the new traffic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.measures.timeline import Verified, Window, pooled
from loadtest.scenario import Lane, Scenario
from loadtest.schedule import domain_of
from loadtest.statistics import Interval

RECOVERED_SHARE = 0.95
_PLATEAU_SHARE = 1 / 3
"""Of the stretch before, and of the stretch after, that counts as its plateau: the last third."""
_SMOOTHED_OVER = 3
"""Windows; one window alone holds too few steps to be believed."""


@dataclass(frozen=True)
class Shift:
    """A change of the traffic that the scenario asks for."""

    at_s: float
    ends_at_s: float
    """Later than `at_s` where the change is gradual."""
    lane: str
    before: str
    """Sources and weights, in words."""
    after: str
    previous_start_s: float
    """Since when the traffic was as before."""
    next_at_s: float
    """Until when it stays as after."""


@dataclass(frozen=True)
class Recovery:
    """What AL did after one shift. None where there were no verify steps to judge by."""

    shift: Shift
    before: float | None
    """AL of the plateau before; None for a change that begins with the run."""
    lowest: float | None
    plateau: float | None
    """AL that was reached in the end."""
    dip_share: float | None
    """How much of the AL before was lost at the lowest point; negative where AL rose."""
    recovered_after_s: float | None
    """From the shift to the first window, at or after the lowest, that reaches 95 % of the new plateau; 0 where none was below."""


def shifts(scenario: Scenario) -> list[Shift]:
    """All changes of traffic, in time."""
    return sorted((shift for lane in scenario.lane for shift in _of_lane(lane)), key=lambda shift: shift.at_s)


def _of_lane(lane: Lane) -> list[Shift]:
    changes: list[tuple[Interval, dict[str, float], dict[str, float]]] = []
    start_s = 0.0
    mix = _normal(lane.phase[0].traffic)
    for phase in lane.phase:
        end_s = start_s + phase.duration_s
        if _normal(phase.traffic) != mix:
            changes.append((Interval(start_s, start_s), mix, _normal(phase.traffic)))
        mix = _normal(phase.traffic)
        if phase.end_traffic is not None and _normal(phase.end_traffic) != mix:
            changes.append((Interval(start_s, end_s), mix, _normal(phase.end_traffic)))
            mix = _normal(phase.end_traffic)
        start_s = end_s
    starts = [0.0, *(when.end_s for when, _, _ in changes)]
    ends = [*(when.start_s for when, _, _ in changes[1:]), start_s]
    return [
        Shift(when.start_s, when.end_s, lane.name, _in_words(before), _in_words(after), previous_s, next_s)
        for (when, before, after), previous_s, next_s in zip(changes, starts, ends, strict=False)
    ]


def _normal(traffic: dict[str, float]) -> dict[str, float]:
    total = sum(traffic.values())
    return {source: round(weight / total, 6) for source, weight in sorted(traffic.items())}


def _in_words(mix: dict[str, float]) -> str:
    names = [domain_of(source) for source in mix]
    if len(names) == 1:
        return names[0]
    return " + ".join(f"{100 * weight:.0f} % {name}" for name, weight in zip(names, mix.values(), strict=True))


def recoveries(windows: Sequence[Window], scenario: Scenario) -> list[Recovery]:
    """One for each shift."""
    parts = [(window, window.of_domain(None)) for window in windows]
    return [_recovery(parts, shift) for shift in shifts(scenario)]


def _recovery(parts: Sequence[tuple[Window, Verified]], shift: Shift) -> Recovery:
    before = _plateau(parts, shift.previous_start_s, shift.at_s)
    after = [
        (window, verified) for window, verified in parts if shift.at_s <= window.start_s and window.end_s <= shift.next_at_s
    ]
    plateau = _plateau(parts, shift.ends_at_s if shift.ends_at_s < shift.next_at_s else shift.at_s, shift.next_at_s)
    curve = _smoothed(after)
    if plateau is None or not curve:
        return Recovery(shift, before, None, plateau, None, None)
    lowest_at = min(range(len(curve)), key=lambda index: curve[index][1])
    enough = RECOVERED_SHARE * plateau
    recovered = next((window for window, value in curve[lowest_at:] if value >= enough), None)
    never_below = min(value for _, value in curve) >= enough
    return Recovery(
        shift=shift,
        before=before,
        lowest=curve[lowest_at][1],
        plateau=plateau,
        dip_share=None if before is None else 1.0 - curve[lowest_at][1] / before,
        recovered_after_s=0.0 if never_below else recovered.end_s - shift.at_s if recovered else None,
    )


def _plateau(parts: Sequence[tuple[Window, Verified]], start_s: float, end_s: float) -> float | None:
    """AL over the last third of the stretch."""
    from_s = end_s - (end_s - start_s) * _PLATEAU_SHARE
    inside = [verified for window, verified in parts if from_s <= window.start_s and window.end_s <= end_s]
    return pooled(inside).acceptance_length


def _smoothed(parts: Sequence[tuple[Window, Verified]]) -> list[tuple[Window, float]]:
    """AL over each window and those just before it, none of them before the first."""
    curve = []
    for index, (window, _) in enumerate(parts):
        value = pooled(verified for _, verified in parts[max(index - _SMOOTHED_OVER + 1, 0) : index + 1]).acceptance_length
        if value is not None:
            curve.append((window, value))
    return curve
