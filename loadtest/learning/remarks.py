"""What whoever reads the numbers of a learning benchmark has to know of its arms. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from loadtest.learning.answers import ArmRun
from loadtest.learning.benchmark import Arm
from loadtest.learning.circumstances import circumstances
from loadtest.learning.verdicts import Results


def remarks(results: Results, unavailable: Mapping[str, str]) -> list[str]:
    """One a line: what makes numbers void, then what they have to be read with."""
    invalid = [
        f"{name} IS NOT VALID: {'; '.join(run.record.invalid_reasons)}"
        for name, run in results.arms.items()
        if run.record is not None and run.record.invalid_reasons
    ]
    missing = [f"{name} is not available: {reason}" for name, reason in unavailable.items()]
    return [*invalid, *_unequal(results.arms), *_known_prompts(results), *missing]


def _unequal(arms: Mapping[str, ArmRun]) -> Iterator[str]:
    """An arm that is done is not run again, even by another release or on another machine."""
    about = {name: circumstances(run.record) for name, run in arms.items() if run.record is not None}
    for what in dict.fromkeys(key for one in about.values() for key in one):
        names_by_value: dict[str, list[str]] = {}
        for name, one in about.items():
            names_by_value.setdefault(one.get(what, "unknown"), []).append(name)
        if len(names_by_value) > 1:
            values = "; ".join(f"{value} ({', '.join(names)})" for value, names in names_by_value.items())
            yield f"ARMS ARE NOT ALIKE in {what}: {values}"


def _known_prompts(results: Results) -> Iterator[str]:
    """A source may have too few prompts for all phases: a draft is fast on those that it has learned from."""
    for arm in results.benchmark.arm:
        if arm.name not in results.arms:
            continue
        known, run = set(_learned_from(results, arm)), results.arms[arm.name]
        for phase in run.phases:
            answers = run.of_phase(phase)
            num_known = sum(answer.prompt_id in known for answer in answers)
            if num_known:
                yield f"{arm.name}: {num_known} of {len(answers)} prompts of {phase!r} are known to the draft it starts from"


def _learned_from(results: Results, arm: Arm) -> Iterator[str]:
    """Prompts that the arms before learned from, to the draft with which this one starts."""
    giver = results.benchmark.find(arm.draft)
    if giver is None:
        return
    yield from _learned_from(results, giver)
    if giver.learns and giver.name in results.arms:
        yield from (answer.prompt_id for answer in results.arms[giver.name].answers.values() if not answer.is_unseen)
