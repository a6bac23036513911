"""Curriculum: which problems are asked next, from what each one's rollouts earned so far.

A problem teaches in proportion to p(1-p), p the chance that a rollout passes: groups in which all fail or all pass have no
advantage. p is not known, so problems are drawn in proportion to what is expected of it, and a share of every round explores:
problems never asked, and those that were put aside as too hard or too easy, since a policy that learns changes them. What is
remembered of a problem fades with the rounds since then, which brings it back by itself.

Sources: p(1-p) as the squared advantage of rewards 0 and 1 (Dr.GRPO, arXiv 2503.20783); dropping what carries no signal (DAPO's
dynamic sampling) and at a pass rate of 0.9 and more (ScaleRL's no-positive-resampling), difficulty pools (prime-rl).
Draws without replacement by weight: Efraimidis and Spirakis 2006.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite, log
from random import Random
from typing import Literal

from pydantic import Field

from rl.controllers.priority import PRIOR, expected_variance
from wire.config import Config

Pool = Literal["unseen", "too_hard", "learnable", "too_easy"]

TOO_HARD, TOO_EASY = 0.1, 0.9
"""Expected pass rates below and above which a problem is put aside."""
HALF_LIFE = 50.0
"""Rounds after which an outcome counts half."""


class CurriculumSettings(Config):
    """`[rl.curriculum]`."""

    num_problems: int = Field(ge=1)
    """They are numbered from 0; procedural environments take the number as their seed."""
    seed: int = 0
    exploration: float = Field(0.2, ge=0.0, le=1.0)
    """Share of each round for problems that are new or were put aside."""


@dataclass(frozen=True, slots=True)
class Record:
    """Outcomes of one problem, counted down to the round in which they were last added to."""

    num_passed: float
    num_failed: float
    at_round: int

    def faded(self, now_round: int) -> Record:
        factor = 0.5 ** (max(now_round - self.at_round, 0) / HALF_LIFE)
        return Record(self.num_passed * factor, self.num_failed * factor, now_round)


@dataclass(frozen=True, slots=True)
class Curriculum:
    """State."""

    num_rounds: int = 0
    records: Mapping[int, Record] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GroupOutcome:
    """One group that came back. Rollouts whose environment failed are in neither number."""

    problem: int
    num_passed: int
    num_failed: int


@dataclass(frozen=True, slots=True)
class CurriculumDecision:
    problems: tuple[int, ...]
    """One for each group to begin, without repeats where there are problems enough."""
    pools: Mapping[Pool, int]
    """How many problems are in each."""
    reason: str


def pool_of(record: Record | None) -> Pool:
    """By the expected pass rate: eight failures alone put a problem aside, three do not yet."""
    if record is None:
        return "unseen"
    rate = (PRIOR + record.num_passed) / (2.0 * PRIOR + record.num_passed + record.num_failed)
    if rate < TOO_HARD:
        return "too_hard"
    return "too_easy" if rate > TOO_EASY else "learnable"


def decide(
    settings: CurriculumSettings, state: Curriculum, outcomes: Sequence[GroupOutcome], num_groups: int
) -> tuple[Curriculum, CurriculumDecision]:
    """Take in what came back and choose problems for `num_groups`. The same seed and outcomes always choose the same.

    Raises ValueError for an outcome of no such problem, a count below 0, or fewer than 0 groups.
    """
    if num_groups < 0:
        raise ValueError(f"{num_groups} groups are asked for; ask for 0 or more")
    this_round = state.num_rounds
    records = dict(state.records)
    for outcome in outcomes:
        _require_sound(settings, outcome)
        records[outcome.problem] = _added(records.get(outcome.problem), outcome, this_round)
    faded = {problem: record.faded(this_round) for problem, record in records.items()}
    random = Random(f"{settings.seed}/{this_round}")
    problems = _choose(settings, faded, num_groups, random)
    pools = _pools(settings, faded)
    chosen = Counter(pool_of(faded.get(problem)) for problem in problems)
    reason = ", ".join(f"{chosen[pool]} of {number} {pool.replace('_', ' ')}" for pool, number in pools.items())
    return replace(state, num_rounds=this_round + 1, records=records), CurriculumDecision(problems, pools, reason)


def _added(record: Record | None, outcome: GroupOutcome, this_round: int) -> Record:
    old = Record(0.0, 0.0, this_round) if record is None else record.faded(this_round)
    return Record(old.num_passed + outcome.num_passed, old.num_failed + outcome.num_failed, this_round)


def _choose(settings: CurriculumSettings, records: Mapping[int, Record], num_groups: int, random: Random) -> tuple[int, ...]:
    """Learnable problems by what they are expected to teach, and the share that explores; each fills what the other lacks."""
    learnable = [problem for problem in sorted(records) if pool_of(records[problem]) == "learnable"]
    aside = [problem for problem in sorted(records) if pool_of(records[problem]) != "learnable"]
    unseen = [problem for problem in range(settings.num_problems) if problem not in records]
    # A draw decides about the fraction of a problem, so that small rounds explore as well.
    num_exploring = int(num_groups * settings.exploration + random.random())
    num_exploring = max(num_exploring, num_groups - len(learnable))
    exploring = _explore(unseen, aside, records, num_exploring, random)
    taught = _weighted(learnable, [_teaches(records[problem]) for problem in learnable], num_groups - len(exploring), random)
    chosen = [*taught, *exploring]
    random.shuffle(chosen)
    while 0 < len(chosen) < num_groups:
        chosen.append(chosen[len(chosen) % settings.num_problems])
    return tuple(chosen)


def _explore(
    unseen: Sequence[int], aside: Sequence[int], records: Mapping[int, Record], number: int, random: Random
) -> list[int]:
    """Half for what was put aside (the longest ago rather than lately), as far as there is any; else unseen ones."""
    num_aside = min(len(aside), max(number // 2 if unseen else number, number - len(unseen)))
    again = _weighted(aside, [_teaches(records[problem]) for problem in aside], num_aside, random)
    return again + random.sample(unseen, min(number - len(again), len(unseen)))


def _teaches(record: Record) -> float:
    return expected_variance(record.num_passed, record.num_failed)


def _weighted(items: Sequence[int], weights: Sequence[float], number: int, random: Random) -> list[int]:
    """`number` items without replacement, by weight: those with the largest log(u) / weight."""
    keys = [(log(1.0 - random.random()) / weight, item) for item, weight in zip(items, weights, strict=True)]
    return [item for _, item in sorted(keys, reverse=True)[: max(number, 0)]]


def _pools(settings: CurriculumSettings, records: Mapping[int, Record]) -> dict[Pool, int]:
    counts = Counter(pool_of(record) for record in records.values())
    return {
        "unseen": settings.num_problems - len(records),
        "too_hard": counts["too_hard"],
        "learnable": counts["learnable"],
        "too_easy": counts["too_easy"],
    }


def _require_sound(settings: CurriculumSettings, outcome: GroupOutcome) -> None:
    if not 0 <= outcome.problem < settings.num_problems:
        raise ValueError(f"an outcome is of problem {outcome.problem}; there are problems 0 to {settings.num_problems - 1}")
    for count in (outcome.num_passed, outcome.num_failed):
        if count < 0 or not isfinite(count):
            raise ValueError(f"problem {outcome.problem} has an outcome of {count} rollouts; count from 0")
