"""The bars of the learning benchmark, from what its arms left. A bar whose arms are missing is not measured, and says which."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import isnan
from typing import Any

from loadtest.bars.registry import Bar, Measured, load
from loadtest.learning import measures
from loadtest.learning.answers import Answer, ArmRun
from loadtest.learning.benchmark import AURORA, COLD, FRESH, NONE, OURS, STATIC, Arm, Benchmark, StreamPhase
from loadtest.statistics import Estimate

GOAL_AL = 1.8
CHATS = "sharegpt"
FUNCTION = "learning_stream:measured"
"""What the entries of bars.toml name."""


@dataclass(frozen=True)
class Results:
    """What is there to judge."""

    benchmark: Benchmark
    arms: Mapping[str, ArmRun]
    """Those that ran."""
    stale: Mapping[str, str] = field(default_factory=dict)
    """Why an arm says nothing of this code on this machine, by name: no bar counts it."""


def bars() -> list[Bar]:
    return [bar for bar in load() if bar.function == FUNCTION]


def measured(results: Results) -> dict[str, Measured]:
    """By the part of a bar's name after the dot."""
    return {name: _measure(results, needs, measure) for name, (needs, measure) in _MEASURES.items()}


def _measure(results: Results, needs: Sequence[str], measure: Callable[[Results], Measured]) -> Measured:
    missing = [name for name in needs if name not in results.arms]
    if missing:
        return Measured(None, {"reason": f"arms that did not run: {', '.join(missing)}"})
    stale = [f"{name} was {results.stale[name]}" for name in _with_givers(results, needs) if name in results.stale]
    if stale:
        return Measured(None, {"reason": "; ".join(stale)})
    found = measure(results)
    invalid = [name for name in needs if (record := results.arms[name].record) is not None and record.invalid_reasons]
    return replace(found, detail={**found.detail, "not_valid": ", ".join(invalid)}) if invalid else found


def _with_givers(results: Results, names: Sequence[str]) -> list[str]:
    """The arms, and those whose drafts they start from."""
    found: dict[str, None] = {}
    for name in names:
        arm = results.benchmark.find(name)
        while arm is not None:
            found[arm.name] = None
            arm = results.benchmark.find(arm.draft)
    return list(found)


def _day_0(results: Results) -> Measured:
    """At the end of the fresh arm's work: speed over that without speculation."""
    fresh = results.arms[FRESH]
    return _ratio(results, FRESH, NONE, measures.last_part(list(fresh.answers.values())))


def _tokens_to_al(results: Results) -> Measured:
    found = _reached(results, FRESH)
    if found is None or not found.is_reached:
        return Measured(None, {"reason": _not_reached(FRESH, found)})
    return Measured(found.num_tokens, {})


def _tokens_to_al_of_aurora(results: Results) -> Measured:
    """Where the recipe does not get there, its tokens are at least those it saw, and the share is an upper bound."""
    ours, theirs = _reached(results, FRESH), _reached(results, AURORA)
    if ours is None or not ours.is_reached:
        return Measured(None, {"reason": _not_reached(FRESH, ours)})
    if theirs is None or not theirs.num_tokens:
        return Measured(None, {"reason": _not_reached(AURORA, theirs)})
    detail: dict[str, Any] = {"ours": ours.num_tokens, "aurora": theirs.num_tokens}
    if not theirs.is_reached:
        detail["note"] = f"{_not_reached(AURORA, theirs)}: the share is at most this"
    return Measured(ours.num_tokens / theirs.num_tokens, detail)


def _reached(results: Results, arm: str) -> measures.Reached | None:
    """On the unseen prompts of the fresh arm's phases: another arm may go on to other traffic, of which the bar says nothing."""
    return measures.tokens_to_reach(results.arms[arm], GOAL_AL, results.arms[FRESH].phases)


def _not_reached(arm: str, found: measures.Reached | None) -> str:
    if found is None:
        return f"{arm} answered fewer than {measures.UNSEEN_WINDOW} unseen prompts"
    return f"{arm} did not reach AL {GOAL_AL} on unseen prompts within {found.num_tokens} tokens"


def _chat_al(results: Results) -> Measured:
    """On unseen prompts in the second half of the phase of chats; `rising` where it is above the first half's for certain."""
    arm = results.arms[OURS]
    phases = [phase.name for phase in results.benchmark.phases_of(_arm(results, OURS)) if set(phase.traffic) == {CHATS}]
    unseen = [one for name in phases for one in arm.of_phase(name) if one.is_unseen]
    if not unseen:
        return Measured(None, {"reason": f"no phase of {OURS} has unseen prompts of {CHATS}"})
    middle = len(unseen) // 2
    first, second = measures.acceptance_length(unseen[:middle]), measures.acceptance_length(unseen[middle:])
    if first is None or second is None:
        return Measured(second, {"reason": f"a half of the unseen prompts of {CHATS} has no verify steps"})
    change = measures.acceptance_change(unseen[:middle], unseen[middle:])
    return Measured(second, {"first_half": first, "change": shown(change), "rising": change.low > 0, "prompts": len(unseen)})


def _shift_speed_up(results: Results) -> Measured:
    """The least of all domains the traffic shifts to, at the end of their phases."""
    found: dict[str, Estimate] = {}
    for phase in shifted_phases(results.benchmark.phases_of(_arm(results, OURS))):
        end = measures.last_part(results.arms[OURS].of_phase(phase.name))
        paired = measures.pairs(results.arms[OURS], results.arms[STATIC], end)
        found[phase.name] = measures.speed_up(paired)
    if not found:
        return Measured(None, {"reason": "the traffic does not shift"})
    lacking = [name for name, estimate in found.items() if isnan(estimate.value)]
    if lacking:
        return Measured(None, {"reason": f"{OURS} and {STATIC} share nothing to compare at the end of {', '.join(lacking)}"})
    return Measured(min(estimate.value for estimate in found.values()), {name: shown(one) for name, one in found.items()})


def _worst_minute(other: str) -> Callable[[Results], Measured]:
    def measure(results: Results) -> Measured:
        worst = measures.worst_minute(results.arms[OURS], results.arms[other])
        if worst is None:
            return Measured(None, {"reason": f"{OURS} and {other} share no request to compare"})
        detail = {"interval": shown(worst.speed_up), "at_s": round(worst.start_s, 1), "phase": worst.phase,
                  "requests": worst.num_pairs, "windows": worst.num_windows}  # fmt: skip
        return Measured(worst.speed_up.value, detail)

    return measure


def _return_windows(results: Results) -> Measured:
    """Back to the first domain."""
    phases = results.benchmark.phases_of(_arm(results, OURS))
    home = phases[0].traffic
    left = next((place for place, phase in enumerate(phases) if phase.traffic != home), len(phases))
    again = [phase.name for phase in phases[left:] if phase.traffic == home]
    if not again:
        return Measured(None, {"reason": f"no later phase of {OURS} has the traffic of {phases[0].name!r}"})
    number = measures.windows_to_regain(results.arms[OURS], phases[left - 1].name, again[0])
    if number is None:
        return Measured(None, {"reason": f"no canary window of {measures.CANARY_STEPS} verify steps to judge by"})
    return Measured(number, {"window": f"{measures.CANARY_STEPS} verify steps"})


def _cold_batch(results: Results) -> Measured:
    return _ratio(results, COLD, NONE)


def _ratio(results: Results, judged: str, other: str, among: Sequence[Answer] | None = None) -> Measured:
    paired = measures.pairs(results.arms[judged], results.arms[other], among)
    found = measures.speed_up(paired)
    if isnan(found.value):
        return Measured(None, {"reason": f"{judged} and {other} share none of these requests"})
    return Measured(found.value, {"interval": shown(found), "requests": len(paired)})


def shifted_phases(phases: Sequence[StreamPhase]) -> list[StreamPhase]:
    """Those whose traffic is not that of the phase before, nor of the first phase."""
    return [
        later
        for earlier, later in pairwise(phases)
        if (later.traffic, later.end_traffic) != (earlier.traffic, earlier.end_traffic) and later.traffic != phases[0].traffic
    ]


def shown(estimate: Estimate) -> str:
    return f"{estimate.value:.3f} ({estimate.low:.3f} to {estimate.high:.3f})"


def _arm(results: Results, name: str) -> Arm:
    found = results.benchmark.find(name)
    assert found is not None, "an arm that ran is in the benchmark"
    return found


_MEASURES: Mapping[str, tuple[tuple[str, ...], Callable[[Results], Measured]]] = {
    "day_0_speed_up": ((FRESH, NONE), _day_0),
    "tokens_to_al": ((FRESH,), _tokens_to_al),
    "tokens_to_al_share": ((FRESH, AURORA), _tokens_to_al_of_aurora),
    "chat_al": ((OURS,), _chat_al),
    "shift_speed_up": ((OURS, STATIC), _shift_speed_up),
    "worst_minute_static": ((OURS, STATIC), _worst_minute(STATIC)),
    "worst_minute_none": ((OURS, NONE), _worst_minute(NONE)),
    "return_windows": ((OURS,), _return_windows),
    "cold_batch_speed": ((COLD, NONE), _cold_batch),
}
"""The arms each needs, and how it is measured."""
