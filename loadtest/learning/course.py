"""AL and speed of each arm along the work: what the figures show. Pure.

The axis is the work itself: completion tokens up to each request, as the arms answered it in the median. So the same request lies
at the same place for every arm, whatever it was answered with and however long it took.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loadtest.learning.answers import Answer, ArmRun
from loadtest.learning.measures import acceptance_length

NUM_POINTS = 60
"""Of a whole benchmark."""


@dataclass(frozen=True)
class Axis:
    """Where each request of the work lies, completion tokens."""

    starts: Mapping[int, float]
    """By index."""
    phases: Mapping[str, tuple[float, float]]
    """From and to, by name, in order."""
    length: float


@dataclass(frozen=True)
class Course:
    """One arm along the axis; a point is a bin of requests."""

    at: list[float]
    acceptance_length: list[float | None]
    tokens_per_s: list[float]
    """Of one stream."""
    swaps_at: list[float]
    """Committed drafts: the start of the request that was sent next."""


def axis(arms: Sequence[ArmRun]) -> Axis:
    by_index: dict[int, list[Answer]] = {}
    for arm in arms:
        for index, answer in arm.answers.items():
            by_index.setdefault(index, []).append(answer)
    starts: dict[int, float] = {}
    phases: dict[str, tuple[float, float]] = {}
    reached = 0.0
    for index in sorted(by_index):
        answers = by_index[index]
        starts[index] = reached
        reached += statistics.median(answer.num_tokens for answer in answers)
        phase = answers[0].phase
        phases[phase] = (phases.get(phase, (starts[index], 0.0))[0], reached)
    return Axis(starts, phases, reached)


def course(arm: ArmRun, along: Axis) -> Course:
    """In bins that do not reach over the end of a phase."""
    width = max(along.length / NUM_POINTS, 1.0)
    bins: dict[tuple[str, int], list[Answer]] = {}
    for index, answer in arm.answers.items():
        if answer.is_ok:
            phase_start = along.phases[answer.phase][0]
            bins.setdefault((answer.phase, int((along.starts[index] - phase_start) // width)), []).append(answer)
    ordered = list(bins.values())
    by_sent = sorted(arm.answers.values(), key=lambda answer: answer.sent_at_s)
    commits_s = [swap.at_s + swap.duration_s for swap in arm.swaps]
    after = (next((one for one in by_sent if one.sent_at_s >= commit_s), None) for commit_s in commits_s)
    return Course(
        at=[statistics.mean(along.starts[answer.index] for answer in answers) for answers in ordered],
        acceptance_length=[acceptance_length(answers) for answers in ordered],
        tokens_per_s=[_speed(answers) for answers in ordered],
        swaps_at=[along.starts[answer.index] for answer in after if answer is not None],
    )


def _speed(answers: Sequence[Answer]) -> float:
    seconds = sum(answer.took_s for answer in answers)
    return sum(answer.num_tokens for answer in answers) / seconds if seconds else 0.0
