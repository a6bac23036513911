"""Throughput matching: divides the machine so that trainer and generator are equally fast, and says which of them waits.

Both have a capacity, what they would do if they never waited: tokens/s over the share of the time they were busy. The slower
one bounds the run. A unit goes to it where that makes the slower one faster: from the faster one, from what the learner has
above its least, or from what users lend. Users come first: their least is never touched, and a unit they need goes to them
within the interval.

It never swings between two splits: a move must gain MIN_GAIN by nearly every reading since the last move (hysteresis), nothing
moves for some intervals after a move (cool-down), a split that was measured is judged by the measurement (`scaling.py`), and
each return to a split that was left doubles what the next return must gain.

Source: the elastic split of verl's hybrid replicas moves only if the gain exceeds a measured cost and shifts its threshold by
experience (verl-project/verl, August 2026); capacities instead of queue lengths are ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from rl.controllers.lending import Lending
from rl.controllers.reading import believable, middle
from rl.controllers.scaling import Scaling
from rl.controllers.split import Lane, Split, SplitLimits

MIN_GAIN = 0.05
"""Of the slower side's capacity; a move costs an interval or two of disturbance."""
MIN_READINGS, KEPT_READINGS = 3, 8
"""At a split before it is judged, and at most."""
SETTLING = 1
"""Intervals after a move whose readings mix two splits."""
KEPT_SPLITS = 8
"""Splits left lately, a return to which counts as one."""
FIRST_MEMORY = 64
"""Intervals without a move after which what units bring is forgotten and one return forgiven; doubles each time, so that a
machine that did not change is tried ever more rarely."""
MIN_BUSY = 0.01
"""Less time than that at work tells no capacity."""
WAITS = 0.05
"""Share of the time from which one is said to wait."""

Side = Literal["rollouts", "trainer"]


@dataclass(frozen=True, slots=True)
class MatchingReading:
    """One update interval. None: not measured. Busy is a share of the time, from 0 to 1."""

    generator_tokens_per_s: float | None
    """Effective ones: output tokens of groups that could be trained on, over the whole interval."""
    generator_busy: float | None
    """Share of the interval in which the staleness gate did not hold it up."""
    trainer_tokens_per_s: float | None
    trainer_busy: float | None
    users_busy: float | None
    users_queued: float | None
    """Users' requests that wait for an engine."""
    learner_busy: float | None = None


@dataclass(frozen=True, slots=True)
class Matching:
    """State."""

    split: Split
    capacities: tuple[tuple[float, float], ...] = ()
    """Tokens/s of (generator, trainer) at this split, the newest readings."""
    settling: int = 0
    lending: Lending = field(default_factory=Lending)
    generator_scaling: Scaling = field(default_factory=Scaling)
    trainer_scaling: Scaling = field(default_factory=Scaling)
    before_move: tuple[Split, tuple[float, float]] | None = None
    """The split before the last move and its capacities, until the new split is measured."""
    left: tuple[Split, ...] = ()
    num_returns: int = 0
    num_quiet: int = 0
    """Intervals since the last move."""
    memory: int = FIRST_MEMORY


@dataclass(frozen=True, slots=True)
class MatchingDecision:
    split: Split
    """From now on."""
    waits: Literal["generator", "trainer", "nobody", "unknown"]
    """Who waited in the interval."""
    reason: str


@dataclass(frozen=True, slots=True)
class _Move:
    giver: Lane
    taker: Lane
    num_units: int
    split: Split


def decide(limits: SplitLimits, state: Matching, reading: MatchingReading) -> tuple[Matching, MatchingDecision]:
    """The next state and split; raises ValueError for a state whose split the limits do not allow."""
    if not limits.allow(state.split):
        raise ValueError(f"{state.split} is outside of {limits}; start from a split within the limits")
    waits, why = _who_waits(reading)
    lending, users_need = state.lending.observe(state.split.users, reading.users_busy, reading.users_queued)
    state = _observe(replace(state, lending=lending), reading)
    if users_need:
        state, what = _serve_users(limits, state)
    else:
        state, what = _match(limits, state, reading)
    return state, MatchingDecision(state.split, waits, f"{why}; {what}")


def _observe(state: Matching, reading: MatchingReading) -> Matching:
    """Take in the capacities, and what the last move taught about scaling."""
    state = _forget(replace(state, num_quiet=state.num_quiet + 1))
    if state.settling:
        return replace(state, settling=state.settling - 1)
    generator = _capacity(reading.generator_tokens_per_s, reading.generator_busy)
    trainer = _capacity(reading.trainer_tokens_per_s, reading.trainer_busy)
    if generator is None or trainer is None:
        return state
    state = replace(state, capacities=(*state.capacities, (generator, trainer))[-KEPT_READINGS:])
    if state.before_move is None or len(state.capacities) < MIN_READINGS:
        return state
    before, (old_generator, old_trainer) = state.before_move
    new_generator, new_trainer = _now(state)
    return replace(
        state,
        before_move=None,
        generator_scaling=state.generator_scaling.after_move(
            (before.rollouts, old_generator), (state.split.rollouts, new_generator)
        ),
        trainer_scaling=state.trainer_scaling.after_move((before.trainer, old_trainer), (state.split.trainer, new_trainer)),
    )


def _forget(state: Matching) -> Matching:
    """What was learnt long ago is learnt anew: another program may have come or gone."""
    if state.num_quiet < state.memory:
        return state
    return replace(
        state,
        num_quiet=0,
        memory=2 * state.memory,
        num_returns=max(state.num_returns - 1, 0),
        generator_scaling=Scaling(),
        trainer_scaling=Scaling(),
    )


def _capacity(tokens_per_s: float | None, busy: float | None) -> float | None:
    rate, share = believable(tokens_per_s), believable(busy, most=1.0 + 1e-6)
    if not rate or share is None or share < MIN_BUSY:
        return None
    return rate / share


def _now(state: Matching) -> tuple[float, float]:
    """Capacities of generator and trainer at this split."""
    generator, trainer = zip(*state.capacities, strict=True)
    return middle(generator), middle(trainer)


def _slower(capacities: tuple[float, float]) -> tuple[Side, Side]:
    """(slower, faster)."""
    return ("rollouts", "trainer") if capacities[0] <= capacities[1] else ("trainer", "rollouts")


def _serve_users(limits: SplitLimits, state: Matching) -> tuple[Matching, str]:
    """A unit for the users: from the learner, else from the faster side, else from the slower one."""
    slower, faster = _slower(_now(state)) if state.capacities else ("trainer", "rollouts")
    givers: tuple[Lane, ...] = ("learner", faster, slower)
    for giver in givers:
        if limits.can_move(state.split, giver, "users"):
            # What was learnt of splits holds for the machine without this unit no longer.
            moved = _moved(state, _Move(giver, "users", 1, state.split.moved(giver, "users")))
            return replace(moved, left=()), f"users need a unit, {giver} gives it"
    return state, "users need a unit, but they have their most or all others their least"


def _match(limits: SplitLimits, state: Matching, reading: MatchingReading) -> tuple[Matching, str]:
    if state.settling or len(state.capacities) < MIN_READINGS:
        return state, f"nothing moves before {MIN_READINGS} readings at this split, {len(state.capacities)} are there"
    slower, faster = _slower(_now(state))
    moves = list(_moves(limits, state, slower, faster))
    best = max(moves, key=lambda move: _gain(state, move, _now(state)), default=None)
    if best is not None:
        gain = _gain(state, best, _now(state))
        wanted = MIN_GAIN * 2.0 ** (state.num_returns if best.split in state.left else 0)
        if gain >= wanted and _is_confirmed(state, best, wanted):
            what = f"{best.num_units} from {best.giver} to {best.taker}: the slower side gains {gain:.0%}"
            return _moved(state, best), what
    spare = _spare_for_learner(limits, state, reading, faster)
    if spare is not None:
        return _moved(state, spare), f"1 from {faster} to learner: {slower} stays the slower side without it"
    return state, f"no move gains the slower side ({slower}) enough"


def _moves(limits: SplitLimits, state: Matching, slower: Side, faster: Side) -> Iterator[_Move]:
    """What could go to the slower side; first what costs nobody anything."""
    split = state.split
    offers: tuple[tuple[Lane, int], ...] = (("learner", 1), (faster, split.of(faster)), ("users", int(state.lending.may_lend)))
    for giver, most in offers:
        for num_units in range(1, most + 1):
            if limits.can_move(split, giver, slower, num_units):
                yield _Move(giver, slower, num_units, split.moved(giver, slower, num_units))


def _gain(state: Matching, move: _Move, capacities: tuple[float, float]) -> float:
    """By which share the slower of the two sides would be faster."""
    now, after = state.split, move.split
    generator = state.generator_scaling.capacity(after.rollouts, now_units=now.rollouts, now_capacity=capacities[0])
    trainer = state.trainer_scaling.capacity(after.trainer, now_units=now.trainer, now_capacity=capacities[1])
    return min(generator, trainer) / min(capacities) - 1.0


def _is_confirmed(state: Matching, move: _Move, wanted: float) -> bool:
    """All readings at this split but one in four call for the move."""
    agreeing = sum(_gain(state, move, capacities) >= wanted for capacities in state.capacities)
    return agreeing >= len(state.capacities) - len(state.capacities) // 4


def _spare_for_learner(limits: SplitLimits, state: Matching, reading: MatchingReading, faster: Side) -> _Move | None:
    """A unit without which the faster side is still the faster by MIN_GAIN; a learner that is at work all the time gets it."""
    busy = believable(reading.learner_busy)
    if busy is None or busy < 1.0 - WAITS or not limits.can_move(state.split, faster, "learner"):
        return None
    move = _Move(faster, "learner", 1, state.split.moved(faster, "learner"))
    now, after = state.split, move.split
    generator, trainer = _now(state)
    if faster == "rollouts":
        slow, left = trainer, state.generator_scaling.capacity(after.rollouts, now_units=now.rollouts, now_capacity=generator)
    else:
        slow, left = generator, state.trainer_scaling.capacity(after.trainer, now_units=now.trainer, now_capacity=trainer)
    return move if left >= slow * (1.0 + MIN_GAIN) else None


def _moved(state: Matching, move: _Move) -> Matching:
    """The state after a move; what is measured from here on is the new split's."""
    is_return = move.split in state.left
    return replace(
        state,
        split=move.split,
        capacities=(),
        settling=SETTLING,
        lending=state.lending.lent() if move.giver == "users" else state.lending,
        before_move=(state.split, _now(state)) if len(state.capacities) >= MIN_READINGS else None,
        left=(*(split for split in state.left if split != state.split), state.split)[-KEPT_SPLITS:],
        num_returns=state.num_returns + int(is_return),
        num_quiet=0,
    )


def _who_waits(reading: MatchingReading) -> tuple[Literal["generator", "trainer", "nobody", "unknown"], str]:
    generator = believable(reading.generator_busy, most=1.0 + 1e-6)
    trainer = believable(reading.trainer_busy, most=1.0 + 1e-6)
    if generator is None or trainer is None:
        return "unknown", "who waits is not known, a busy share is missing"
    if min(generator, trainer) > 1.0 - WAITS:
        return "nobody", "nobody waits"
    if trainer <= generator:
        return "trainer", f"the trainer waits {1.0 - trainer:.0%} of the time for finished groups"
    return "generator", f"the generator waits {1.0 - generator:.0%} of the time at the staleness gate"
