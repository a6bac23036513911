"""A reward model that is trained along with the policy: Cooper (arXiv 2508.05613), with a program in place of the assistant.

    1. the policy's answers are scored by the model;
    2. of those the rule accepts, each is corrupted, and the model learns the difference;
    3. the rule watches: its verdict stays in the record whatever it weighs, and disagreement is an alarm (`audit.py`).

A model that stands still is found out by the policy within a run; one that learns from the policy's own newest answers is not as
easily. Where the answer that is put in place of a right one counts as right too, there is nothing to learn, and the rule is doubted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
from msgspec import Struct

from rl.rewards.audit import Audit, Verdict, alarms, audit
from rl.rewards.claims import Claim, Pair
from rl.rewards.config import RewardModelSettings
from rl.rewards.corruption import corruptions
from rl.rewards.reward_model import RewardModel

MAX_ASKED = 16
"""Rules at a time, for each worker environments live in. Where math-verify answers one after the other, the last in line waits for all
before it; a worker that is silent for two minutes is killed with the rollouts that play there (`rl/environments/pool.py`)."""

Rule = Callable[[str], Awaitable[bool | None]]
"""Whether a problem's own rule accepts a completion; None where it cannot be asked."""


class Answer(Struct, frozen=True):
    """One that the policy gave and the model scored."""

    claim: Claim
    is_right: bool
    score: float | None
    """Of the model as it was then; None: it was not asked."""


class Lesson(Struct, frozen=True):
    """What the model learns from in one step, and how it and the rule stood before."""

    pairs: tuple[Pair, ...] = ()
    audit: Audit = Audit()


class RewardModelReport(Struct, frozen=True, kw_only=True, tag="reward_model_report"):
    """Of one step of the reward model."""

    num_pairs: int
    loss: float
    """Before the update, nats per pair; 0 without pairs."""
    audit: Audit
    """Of the verdicts on this step's answers when they were given."""
    alarms: tuple[str, ...]


async def lesson_of(answers: Sequence[tuple[Answer, Rule]], step: int, *, num_workers: int = 1) -> Lesson:
    """Answers of one step, each with its problem's rule; from the same ones and the same step follows the same lesson."""
    right = [(place, answer.claim, rule) for place, (answer, rule) in enumerate(answers) if answer.is_right]
    seats = asyncio.Semaphore(MAX_ASKED * num_workers)

    async def changed_in_turn(place: int, claim: Claim, rule: Rule) -> tuple[Claim | None, bool]:
        async with seats:
            return await _corrupted(claim, rule, np.random.default_rng((step, place)))

    changed = await asyncio.gather(*(changed_in_turn(*each) for each in right))
    pairs = tuple(Pair(claim, wrong) for (_, claim, _), (wrong, _) in zip(right, changed, strict=True) if wrong is not None)
    num_unread = sum(is_unread for _, is_unread in changed)
    found = audit(Verdict(answer.is_right, answer.score) for answer, _ in answers if answer.score is not None)
    return Lesson(pairs, found + Audit(num_changed=len(pairs) + num_unread, num_unread=num_unread))


def learn(model: RewardModel, lesson: Lesson, settings: RewardModelSettings) -> RewardModelReport:
    return RewardModelReport(
        num_pairs=len(lesson.pairs),
        loss=model.update(lesson.pairs),
        audit=lesson.audit,
        alarms=tuple(alarms(lesson.audit, settings.max_disagreement)),
    )


async def _corrupted(claim: Claim, rule: Rule, generator: np.random.Generator) -> tuple[Claim | None, bool]:
    """(A corruption that the rule refuses, or None; whether it accepted all there were)."""
    was_tried = False
    for other in corruptions(claim, generator):
        is_right = await rule(other.completion)
        if is_right is None:
            return None, False
        if not is_right:
            return other, False
        was_tried = True
    return None, was_tried
