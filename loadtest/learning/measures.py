"""The arithmetic of the learning benchmark. Pure; METRICS.md says what each number means.

Arms are compared by speed: tokens over seconds from sending a request to the end of its answer, summed over the same requests
of both. With so many requests always in flight that is proportional to throughput, and no minute of one arm needs a partner.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import isnan

import numpy as np

from loadtest.detectors.domain_shift import RECOVERED_SHARE
from loadtest.learning.answers import Answer, ArmRun
from loadtest.measures import bootstrap
from loadtest.measures.bootstrap import NOTHING, NUM_BLOCKS
from loadtest.measures.histogram import sums_by
from loadtest.statistics import Estimate

Pair = tuple[Answer, Answer]
"""The same request, answered by the arm that is judged and by the one it is compared with."""

LAST_SHARE = 1 / 3
"""Of a phase that counts as its end, as in the detector of domain shifts."""
MINUTE_S = 60.0
MIN_WINDOW_SHARE = 0.5
"""Of a minute: a shorter rest at the end of a run is no window."""
UNSEEN_WINDOW = 6
"""Answers to unseen prompts over which AL is taken, while it is being reached."""
CANARY_STEPS = 200
"""Verify steps of a canary's window (`canary.min_verify_steps`)."""


@dataclass(frozen=True)
class WorstWindow:
    """The minute of an arm in which it did worst against another."""

    start_s: float
    """Of the judged arm's clock."""
    phase: str
    """At the window's first request."""
    speed_up: Estimate
    num_pairs: int
    num_windows: int


@dataclass(frozen=True)
class Reached:
    """How many tokens it took to reach an AL."""

    num_tokens: int
    """Completion tokens the learner could see until then; until the last unseen prompt where it was not reached."""
    is_reached: bool


def pairs(judged: ArmRun, other: ArmRun, among: Iterable[Answer] | None = None) -> list[Pair]:
    """Requests that both answered whole, in order, of some or all of the judged arm's; raises ValueError where the arms did different work."""
    found = []
    for answer in judged.answers.values() if among is None else among:
        index = answer.index
        partner = other.answers.get(index)
        if partner is None:
            continue
        if (partner.prompt_id, partner.phase) != (answer.prompt_id, answer.phase):
            raise ValueError(
                f"request {index} is {answer.prompt_id} in {answer.phase!r} for {judged.name} but {partner.prompt_id} in "
                f"{partner.phase!r} for {other.name}; arms of different benchmarks cannot be compared"
            )
        if answer.is_ok and partner.is_ok:
            found.append((answer, partner))
    return found


def speed_up(found: Sequence[Pair]) -> Estimate:
    """Speed of the judged over that of the other, with a 95 % interval from a bootstrap over blocks of successive requests.

    0 where the judged arm made no token; no number where the other made none, for nothing is compared then.
    """
    if not found:
        return NOTHING
    number = _num_blocks(found)
    block_of = np.arange(len(found)) * number // len(found)
    sums = [
        np.bincount(block_of, weights=[value(pair) for pair in found], minlength=number)
        for value in (
            lambda pair: pair[0].num_tokens,
            lambda pair: pair[0].took_s,
            lambda pair: pair[1].num_tokens,
            lambda pair: pair[1].took_s,
        )
    ]
    tokens, seconds, other_tokens, other_seconds = sums
    if any(part.sum() <= 0 for part in (seconds, other_tokens, other_seconds)):
        return NOTHING
    weights = bootstrap.equal(number).weights
    with np.errstate(divide="ignore", invalid="ignore"):
        resampled = (weights @ tokens) / (weights @ seconds) / ((weights @ other_tokens) / (weights @ other_seconds))
    value = float(tokens.sum() / seconds.sum() / (other_tokens.sum() / other_seconds.sum()))
    return bootstrap.around(value, np.where(np.isfinite(resampled), resampled, np.nan), number)


def _num_blocks(found: Sequence[Pair]) -> int:
    """As many as in any bootstrap of a run, but none of fewer requests than ran at a time: these share batches."""
    at_a_time = max(_most_at_a_time([pair[side] for pair in found]) for side in (0, 1))
    return max(min(NUM_BLOCKS, len(found) // at_a_time), 1)


def _most_at_a_time(answers: Sequence[Answer]) -> int:
    starts_s, ends_s = (np.sort([getattr(one, name) for one in answers]) for name in ("sent_at_s", "ended_at_s"))
    return int((np.arange(1, len(answers) + 1) - np.searchsorted(ends_s, starts_s, side="right")).max())


def last_part(answers: Sequence[Answer], share: float = LAST_SHARE) -> list[Answer]:
    """The last requests of a phase."""
    return list(answers[len(answers) - max(round(len(answers) * share), 1) :]) if answers else []


def acceptance_length(answers: Iterable[Answer]) -> float | None:
    """Tokens per verify step over all of them; None without a step."""
    num_steps = num_accepted = 0
    for answer in answers:
        num_steps += len(answer.accepted)
        num_accepted += sum(answer.accepted)
    return 1.0 + num_accepted / num_steps if num_steps else None


def acceptance_change(before: Sequence[Answer], after: Sequence[Answer]) -> Estimate:
    """AL over `after` less AL over `before`, with the interval of two independent bootstraps over requests."""
    return bootstrap.difference(_acceptance(after, seed=1), _acceptance(before, seed=0))


def _acceptance(answers: Sequence[Answer], *, seed: int) -> Estimate:
    number = max(min(NUM_BLOCKS, len(answers)), 1)
    block_of = np.arange(len(answers)) * number // max(len(answers), 1)
    steps = sums_by(block_of, np.array([len(one.accepted) for one in answers], dtype=float), number)
    accepted = sums_by(block_of, np.array([sum(one.accepted) for one in answers], dtype=float), number)
    return bootstrap.ratio(bootstrap.equal(number, seed=seed), steps + accepted, steps)


def worst_minute(judged: ArmRun, other: ArmRun) -> WorstWindow | None:
    """Successive minutes of the judged arm, each with the requests that ended in it; the one with the least speed-up.

    None where in no minute anything is compared.
    """
    found = pairs(judged, other)
    if not found:
        return None
    end_s = max(answer.ended_at_s for answer, _ in found)
    start_s = min(answer.sent_at_s for answer, _ in found)
    windows: dict[int, list[Pair]] = {}
    for pair in found:
        windows.setdefault(int((pair[0].ended_at_s - start_s) // MINUTE_S), []).append(pair)
    last = max(windows)
    if last > 0 and end_s - start_s - last * MINUTE_S < MIN_WINDOW_SHARE * MINUTE_S:
        del windows[last]
    judged_windows = [
        WorstWindow(start_s + number * MINUTE_S, inside[0][0].phase, speed_up(inside), len(inside), len(windows))
        for number, inside in windows.items()
    ]
    compared = [window for window in judged_windows if not isnan(window.speed_up.value)]
    return min(compared, key=lambda window: window.speed_up.value, default=None)


def tokens_to_reach(run: ArmRun, level: float, phases: Collection[str]) -> Reached | None:
    """Until AL over the last answers to unseen prompts of these phases is `level`; None where the arm has too few of them.

    Counted are the tokens of the answers that ended before, of requests the learner could see in any phase. Where `level` is
    not reached, what came after the last unseen prompt does not count: nothing tells whether it would have been reached there.
    """
    unseen = _by_end(one for one in run.answers.values() if one.is_unseen and one.is_ok and one.phase in phases)
    if len(unseen) < UNSEEN_WINDOW:
        return None
    for number in range(UNSEEN_WINDOW, len(unseen) + 1):
        found = acceptance_length(unseen[number - UNSEEN_WINDOW : number])
        if found is not None and found >= level:
            return Reached(_seen_tokens(run, unseen[number - 1].ended_at_s), True)
    return Reached(_seen_tokens(run, unseen[-1].ended_at_s), False)


def _seen_tokens(run: ArmRun, until_s: float) -> int:
    return sum(one.num_tokens for one in run.answers.values() if not one.is_unseen and one.ended_at_s <= until_s)


def windows_to_regain(run: ArmRun, old_phase: str, new_phase: str) -> int | None:
    """Canary windows that pass in the new phase before one has 95 % of the AL at the old phase's end; None without a whole one.

    Where none has it, all of the phase's windows count, and one more.
    """
    old = acceptance_length(last_part(run.of_phase(old_phase)))
    steps = [accepted for answer in _by_end(run.of_phase(new_phase)) for accepted in answer.accepted]
    if old is None or len(steps) < CANARY_STEPS:
        return None
    starts = range(0, len(steps) - CANARY_STEPS + 1, CANARY_STEPS)
    for number, start in enumerate(starts):
        window = steps[start : start + CANARY_STEPS]
        if 1.0 + sum(window) / len(window) >= RECOVERED_SHARE * old:
            return number
    return len(starts) + 1


def _by_end(answers: Iterable[Answer]) -> list[Answer]:
    return sorted(answers, key=lambda answer: answer.ended_at_s)
