"""Concurrency: how many rollouts one engine holds at a time, from its KV use, its queue and its preemptions.

Grows while the cap binds and KV is plentiful, by a quarter per turnover until something had to be cut and by a little per
turnover after that; shrinks by shares. Users' requests hold KV too and are not cut: rollouts make room for them.

Source: the rules and numbers of prime-rl's concurrency controller (PrimeIntellect-ai/prime-rl, August 2026): x1.25 per turnover while KV is
below 0.6 and the cap binds, trim above 0.8 to 0.7, take back the youngest above 0.9, x0.8 on preemption and x0.5 on its repeat,
x0.9 where more than half as many wait as run for 6 readings, no growth after 15 s of silence. Ours: small steps above half of
where the last cut found us (slow start and congestion avoidance, RFC 5681), since additive increase with multiplicative
decrease is what settles (Chiu and Jain 1989); a wall that several small steps do not find again is held to be gone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, floor, inf

from pydantic import Field, model_validator

from rl.controllers.reading import believable
from wire.config import Config

GROWTH = 1.25
PLENTIFUL = 0.6
BINDS = 0.9
"""Share of the cap that runs or waits where the cap is what bounds it."""
SOFT, SOFT_GOAL, HARD = 0.8, 0.7, 0.9
"""Shares of the KV cache."""
CUT_ON_PREEMPTION, CUT_ON_REPEAT, CUT_ON_QUEUE = 0.8, 0.5, 0.9
LONG_QUEUE, QUEUE_READINGS = 0.5, 6
SILENCE_S = 15.0
CAREFUL_STEP, CAREFUL_TURNOVERS = 1 / 32, 8
"""Share of the cap by which it grows where a cut has shown a wall, and after how many such steps the wall is held to be gone."""


class ConcurrencyLimits(Config):
    least: int = Field(1, ge=1)
    most: int = Field(256, ge=1)

    @model_validator(mode="after")
    def _is_a_range(self) -> ConcurrencyLimits:
        if self.most < self.least:
            raise ValueError(f"at least {self.least} and at most {self.most} rollouts is no range; raise most")
        return self


@dataclass(frozen=True, slots=True)
class ConcurrencyReading:
    """One poll of one engine's metrics. None: the metric is missing."""

    now_s: float
    kv_used: float | None
    """Share of the KV cache, users' included, 0 to 1."""
    num_running: int
    """Rollouts in the engine's batch."""
    num_queued: int
    """Rollouts that wait inside the engine."""
    num_users: int
    """Users' requests that run or wait in it."""
    num_preempted: float | None
    """Preemptions since the engine started."""
    num_finished: float | None
    """Rollouts finished since the engine started."""


@dataclass(frozen=True, slots=True)
class Concurrency:
    """State."""

    cap: int
    careful_above: float = inf
    """From this cap on growth goes in small steps."""
    num_careful: int = 0
    """Small steps since the last cut."""
    heard_s: float | None = None
    """Time of the last usable reading."""
    finished_at_start: float | None = None
    """Counter of finished rollouts when this turnover began."""
    most_kv_used: float = 0.0
    """In this turnover."""
    num_long_queues: int = 0
    """Readings in a row."""
    preempted: float | None = None
    """Counter at the last reading."""
    is_after_preemption: bool = False
    """The cap was cut for a preemption and has not grown since."""


@dataclass(frozen=True, slots=True)
class ConcurrencyDecision:
    cap: int
    num_taken_back: int
    """The youngest rollouts to abort now; they keep their tokens and resume later."""
    reason: str


def decide(
    limits: ConcurrencyLimits, state: Concurrency, reading: ConcurrencyReading
) -> tuple[Concurrency, ConcurrencyDecision]:
    """The next state and cap. A reading without KV use changes nothing, and silence ends growth until a whole new turnover."""
    kv_used = believable(reading.kv_used, most=1.0 + 1e-6)
    now_s = believable(reading.now_s)
    counts = reading.num_running, reading.num_queued, reading.num_users
    if kv_used is None or now_s is None or min(counts) < 0:
        return state, ConcurrencyDecision(state.cap, 0, "nothing changes: KV use, the time or a count is missing or absurd")
    if state.heard_s is not None and now_s < state.heard_s:
        return state, ConcurrencyDecision(state.cap, 0, "nothing changes: the reading is older than the last one")
    state, num_preemptions = _observe(state, reading, kv_used, now_s)
    cut = _cut(state, reading, kv_used, num_preemptions)
    if cut is not None:
        cap, why = cut
        return _after_cut(limits, state, reading, cap, kv_used, why, is_preemption=num_preemptions > 0)
    return _grown(limits, state, reading)


def _observe(state: Concurrency, reading: ConcurrencyReading, kv_used: float, now_s: float) -> tuple[Concurrency, float]:
    """The state with what the reading says, and preemptions since the last one; a counter that fell began anew."""
    preempted, finished = believable(reading.num_preempted), believable(reading.num_finished)
    before = state.preempted
    num_preemptions = 0.0 if preempted is None or before is None else max(preempted - before, 0.0)
    is_long = reading.num_queued > LONG_QUEUE * reading.num_running
    was_silent = state.heard_s is not None and now_s - state.heard_s > SILENCE_S
    start = state.finished_at_start
    begins = was_silent or start is None or (finished is not None and finished < start)
    state = replace(
        state,
        heard_s=now_s,
        preempted=before if preempted is None else preempted,
        num_long_queues=state.num_long_queues + 1 if is_long else 0,
        most_kv_used=kv_used if begins else max(state.most_kv_used, kv_used),
        finished_at_start=finished if begins else start,
    )
    return state, num_preemptions


def _cut(state: Concurrency, reading: ConcurrencyReading, kv_used: float, num_preemptions: float) -> tuple[float, str] | None:
    """The lowest cap that any rule asks for."""
    cuts: list[tuple[float, str]] = []
    if kv_used > SOFT:
        # Every sequence is taken to hold as much KV as any other; users keep theirs.
        num_sequences = reading.num_running + reading.num_users
        room = floor(num_sequences * SOFT_GOAL / kv_used) - reading.num_users
        cuts.append((room, f"{kv_used:.0%} of KV is used, above {SOFT:.0%}: back to {SOFT_GOAL:.0%}"))
    if num_preemptions > 0:
        factor = CUT_ON_REPEAT if state.is_after_preemption else CUT_ON_PREEMPTION
        cuts.append((state.cap * factor, f"{num_preemptions:g} preemptions: x{factor}"))
    if state.num_long_queues >= QUEUE_READINGS:
        cuts.append((state.cap * CUT_ON_QUEUE, f"a long queue for {QUEUE_READINGS} readings: x{CUT_ON_QUEUE}"))
    return min((cut for cut in cuts if cut[0] < state.cap), default=None)


def _after_cut(
    limits: ConcurrencyLimits,
    state: Concurrency,
    reading: ConcurrencyReading,
    wanted: float,
    kv_used: float,
    why: str,
    *,
    is_preemption: bool,
) -> tuple[Concurrency, ConcurrencyDecision]:
    cap = max(limits.least, min(floor(wanted), limits.most))
    after = replace(
        state,
        cap=cap,
        careful_above=state.cap / 2.0,
        num_careful=0,
        finished_at_start=None,
        most_kv_used=0.0,
        num_long_queues=0,
        is_after_preemption=state.is_after_preemption or is_preemption,
    )
    return after, ConcurrencyDecision(cap, _taken_back(reading, kv_used, cap), why)


def _taken_back(reading: ConcurrencyReading, kv_used: float, cap: int) -> int:
    """Above HARD draining is too slow: all running ones over the cap go at once."""
    return max(reading.num_running - cap, 0) if kv_used > HARD else 0


def _grown(
    limits: ConcurrencyLimits, state: Concurrency, reading: ConcurrencyReading
) -> tuple[Concurrency, ConcurrencyDecision]:
    finished, start = believable(reading.num_finished), state.finished_at_start
    kv_used = believable(reading.kv_used) or 0.0
    taken_back = _taken_back(reading, kv_used, state.cap)
    if finished is None or start is None or finished - start < state.cap:
        return state, ConcurrencyDecision(state.cap, taken_back, "holds: the rollouts in flight have not turned over once")
    over = replace(state, finished_at_start=finished, most_kv_used=kv_used)
    if state.most_kv_used >= PLENTIFUL:
        return over, ConcurrencyDecision(state.cap, taken_back, f"holds: {state.most_kv_used:.0%} of KV was used")
    if reading.num_running + reading.num_queued < BINDS * state.cap:
        return over, ConcurrencyDecision(state.cap, taken_back, "holds: the cap does not bind, fewer rollouts are there")
    if reading.num_queued > 0:
        return over, ConcurrencyDecision(state.cap, taken_back, "holds: rollouts wait inside the engine already")
    cap = min(_next_cap(state), limits.most)
    if cap == state.cap:
        return over, ConcurrencyDecision(cap, taken_back, f"holds: {cap} is the most that is allowed")
    num_careful = state.num_careful + int(state.cap >= state.careful_above)
    grown = replace(over, cap=cap, num_careful=num_careful, is_after_preemption=False)
    return grown, ConcurrencyDecision(cap, 0, f"grows from {state.cap}: the cap binds and KV was below {PLENTIFUL:.0%}")


def _next_cap(state: Concurrency) -> int:
    if state.cap < state.careful_above or state.num_careful >= CAREFUL_TURNOVERS:
        return ceil(state.cap * GROWTH)
    return state.cap + max(1, floor(state.cap * CAREFUL_STEP))
