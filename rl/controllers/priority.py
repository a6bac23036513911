"""Trajectory priority: which rollouts run, which are preempted for others, and the integer each one gets in vLLM.

A rollout is worth most where its tokens soonest turn into a gradient: it is nearly finished, it is the last of its group (a
group is trained on whole), its group's rewards are likely to differ (the advantage's variance is p(1-p) for rewards of 0 and 1),
and its oldest token is about to become too stale. Users come before all of them. A preempted rollout keeps its tokens,
log-probabilities and spans and resumes; it gains with each round that it waits and cannot be preempted for ever.

Sources: Seer orders by estimated length, no framework we know of ships more; variance of
the advantage for rewards of 0 and 1 from R - mean (Dr.GRPO, arXiv 2503.20783); deadlines as earliest deadline first, those that
cannot be met given up (Liu and Layland 1973). vLLM's `priority`: lower is earlier, 0 where none is given, which is the users'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

USERS = 0
"""Users' priority in vLLM; every rollout's number is higher."""
FIRST, LAST = 1, 1000
"""Range of rollouts' priorities."""
MARGIN = 0.2
"""By which a rollout must be worth more than a running one to take its place; a preemption costs a prefill."""
MAX_PREEMPTIONS = 3
"""For other rollouts; users may always take a place."""
PRIOR = 0.5
"""Jeffreys' for a share, Beta(1/2, 1/2): most problems are nearly always or nearly never solved by a given policy."""
PATIENT_ROUNDS = 50.0
"""Rounds of waiting that weigh as much as one whole term of the score."""
HOPELESS = 1.5
"""A group is given up where it needs that much more time than it has, and half an update: estimates of lengths are rough, and
what is merely late is sorted out when it is consumed."""
NEARLY_DONE = 0.9
"""Share of its expected length after which a rollout is not preempted for another one."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One that is neither finished nor evicted."""

    rollout_id: str
    group_id: int
    num_done_tokens: int
    num_expected_tokens: float
    """Whole length, as far as can be told (the environment's mean, for instance)."""
    is_running: bool


@dataclass(frozen=True, slots=True)
class GroupOutlook:
    """What is known of one group."""

    num_unfinished: int
    """Rollouts of it that are not finished, those that were not begun included."""
    num_successes: float
    num_failures: float
    """Rewards above and not above the middle, of this problem so far; they may be counted down with age."""
    num_updates_left: float
    """Updates until its oldest token is too stale to be trained on; inf where it has none yet."""


@dataclass(frozen=True, slots=True)
class PriorityReading:
    rollouts: Sequence[Rollout]
    groups: Mapping[int, GroupOutlook]
    num_slots: int
    """Rollouts that may run now: the concurrency controller's cap less what users need."""
    tokens_per_update: float | None
    """Tokens one running rollout makes between two updates; None: not known."""


@dataclass(frozen=True, slots=True)
class Past:
    num_waited: int = 0
    """Rounds in a row."""
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Priority:
    """State: what each unfinished rollout went through."""

    pasts: Mapping[str, Past] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PriorityDecision:
    priorities: Mapping[str, int]
    """vLLM's integers, USERS < FIRST <= each <= LAST; stock vLLM takes them when a request is sent."""
    start: tuple[str, ...]
    """To send or resume now, the most valuable first."""
    preempt: tuple[str, ...]
    """To abort and keep."""
    hopeless_groups: tuple[int, ...]
    """They cannot finish before they are too stale; evict and refill them whole."""
    reason: str


def decide(state: Priority, reading: PriorityReading) -> tuple[Priority, PriorityDecision]:
    """The next state and who runs. Raises ValueError for a rollout whose group is not in the reading, or an id that is twice."""
    _require_sound(reading)
    hopeless = _hopeless(reading)
    pasts = {rollout.rollout_id: state.pasts.get(rollout.rollout_id, Past()) for rollout in reading.rollouts}
    scores = {rollout.rollout_id: _score(reading, rollout, pasts[rollout.rollout_id]) for rollout in reading.rollouts}
    alive = [rollout for rollout in reading.rollouts if rollout.group_id not in hopeless]
    # The id decides between equals, so that the same reading always gives the same answer.
    ranked = sorted(alive, key=lambda rollout: (-scores[rollout.rollout_id], rollout.rollout_id))
    running = [rollout for rollout in ranked if rollout.is_running]
    num_slots = max(reading.num_slots, 0)
    stays, for_users = running[:num_slots], running[num_slots:]
    waiting = [rollout for rollout in ranked if not rollout.is_running]
    start = waiting[: num_slots - len(stays)]
    taken, displaced = _exchanges(waiting[len(start) :], stays, scores, pasts)
    start += taken
    lost = [rollout for rollout in running if rollout in displaced or rollout in for_users]
    started = {rollout.rollout_id for rollout in start}
    preempted = {rollout.rollout_id for rollout in lost}
    preempted_for_rollouts = {rollout.rollout_id for rollout in displaced}
    after = {
        rollout.rollout_id: _next_past(
            pasts[rollout.rollout_id],
            runs=rollout.rollout_id in started or (rollout.is_running and rollout.rollout_id not in preempted),
            is_displaced=rollout.rollout_id in preempted_for_rollouts,
        )
        for rollout in reading.rollouts
    }
    decision = PriorityDecision(
        priorities={name: _integer(score) for name, score in scores.items()},
        start=tuple(rollout.rollout_id for rollout in start),
        preempt=tuple(rollout.rollout_id for rollout in lost),
        hopeless_groups=tuple(sorted(hopeless)),
        reason=f"{num_slots} slots: {len(stays) - len(displaced)} stay, {len(start)} start; {len(for_users)} make room for "
        f"users, {len(displaced)} for worthier ones; {len(hopeless)} groups cannot finish in time",
    )
    return Priority(after), decision


def expected_variance(num_successes: float, num_failures: float) -> float:
    """E[p(1-p)] times 4, from 0 to 1: ab / ((a+b)(a+b+1)) of Beta(a, b), a and b the prior plus what was seen."""
    a, b = PRIOR + num_successes, PRIOR + num_failures
    return 4.0 * a * b / ((a + b) * (a + b + 1.0))


def _score(reading: PriorityReading, rollout: Rollout, past: Past) -> float:
    """Four terms from 0 to 1 and what waiting adds."""
    group = reading.groups[rollout.group_id]
    completion = 1.0 / max(group.num_unfinished, 1)
    variance = expected_variance(group.num_successes, group.num_failures)
    waited = past.num_waited / PATIENT_ROUNDS
    return _progress(rollout) + completion + variance + _urgency(reading, rollout) + waited


def _progress(rollout: Rollout) -> float:
    return min(rollout.num_done_tokens / max(rollout.num_expected_tokens, rollout.num_done_tokens, 1.0), 1.0)


def _updates_needed(reading: PriorityReading, rollout: Rollout) -> float:
    """Updates that go by while it is finished, if it runs from now on; 0 where that cannot be told."""
    speed = reading.tokens_per_update
    if speed is None or not isfinite(speed) or speed <= 0.0:
        return 0.0
    return max(rollout.num_expected_tokens - rollout.num_done_tokens, 0.0) / speed


def _urgency(reading: PriorityReading, rollout: Rollout) -> float:
    """1 where it must run from now on to be in time, less with each update it could still wait."""
    slack = reading.groups[rollout.group_id].num_updates_left - _updates_needed(reading, rollout)
    return 1.0 / (1.0 + max(slack, 0.0))


def _hopeless(reading: PriorityReading) -> set[int]:
    """Groups of which one rollout cannot finish in time even if nothing stops it."""
    return {
        rollout.group_id
        for rollout in reading.rollouts
        if _updates_needed(reading, rollout) > HOPELESS * max(reading.groups[rollout.group_id].num_updates_left, 0.0) + 0.5
    }


def _exchanges(
    waiting: Sequence[Rollout], running: Sequence[Rollout], scores: Mapping[str, float], pasts: Mapping[str, Past]
) -> tuple[list[Rollout], list[Rollout]]:
    """Worthiest waiting ones for least worthy running ones, as long as the difference is worth a preemption."""
    victims = [
        rollout
        for rollout in reversed(running)
        if pasts[rollout.rollout_id].num_preemptions < MAX_PREEMPTIONS and _progress(rollout) < NEARLY_DONE
    ]
    pairs = [
        (newcomer, victim)
        for newcomer, victim in zip(waiting, victims, strict=False)
        if scores[newcomer.rollout_id] > scores[victim.rollout_id] + MARGIN
    ]
    return [newcomer for newcomer, _ in pairs], [victim for _, victim in pairs]


def _next_past(past: Past, *, runs: bool, is_displaced: bool) -> Past:
    return Past(0 if runs else past.num_waited + 1, past.num_preemptions + int(is_displaced))


def _integer(score: float) -> int:
    """Scores of 4 and more are FIRST, 0 is LAST."""
    share = min(max(score / 4.0, 0.0), 1.0)
    return round(LAST - share * (LAST - FIRST))


def _require_sound(reading: PriorityReading) -> None:
    seen: set[str] = set()
    for rollout in reading.rollouts:
        if rollout.rollout_id in seen:
            raise ValueError(f"rollout {rollout.rollout_id!r} is in the reading twice; give each once")
        seen.add(rollout.rollout_id)
        group = reading.groups.get(rollout.group_id)
        if group is None:
            raise ValueError(f"rollout {rollout.rollout_id!r} is of group {rollout.group_id}, which the reading leaves out")
        if rollout.num_done_tokens < 0 or not isfinite(rollout.num_expected_tokens):
            raise ValueError(
                f"rollout {rollout.rollout_id!r} has {rollout.num_done_tokens} tokens of {rollout.num_expected_tokens} expected; "
                "both are finite and the first is 0 or more"
            )
        outcomes = group.num_successes, group.num_failures
        if (
            not all(isfinite(number) and number >= 0.0 for number in outcomes)
            or group.num_updates_left != group.num_updates_left
        ):
            raise ValueError(f"group {rollout.group_id} has an outlook that is no number: {group}")
