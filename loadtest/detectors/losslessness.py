"""Losslessness: speculation must not change a greedy answer. A run is compared with a run without speculation, text by text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from loadtest.records import RequestRecord
from loadtest.scenario import Scenario

Key = tuple[str, int]
"""Prompt id and turn."""
_CUT = "length"
"""The finish reason of an answer that was cut at `max_tokens`."""
MAX_LISTED = 20


@dataclass(frozen=True)
class Answer:
    """A greedy answer."""

    text: str
    is_cut: bool


@dataclass(frozen=True)
class Difference:
    """An answer that differs from the reference."""

    prompt_id: str
    turn: int
    first_character: int
    """The first that differs."""
    reference: str
    """From a little before that character on."""
    found: str


@dataclass(frozen=True)
class Losslessness:
    """What came of the comparison."""

    num_compared: int
    num_different: int
    num_without_reference: int
    num_unstable: int
    """Prompts that the reference run itself answered in more than one way; nothing can be said of those."""
    differences: list[Difference]
    """The first 20."""

    @property
    def verdict(self) -> str:
        """`undecided` where nothing could be compared."""
        return "differs" if self.num_different else "equal" if self.num_compared else "undecided"


def greedy(records: Iterable[RequestRecord], scenario: Scenario) -> Iterable[RequestRecord]:
    """Those that were answered whole at temperature 0."""
    lanes = {lane.name for lane in scenario.lane if lane.temperature == 0.0}
    return (record for record in records if record.outcome == "ok" and record.lane in lanes)


def losslessness(reference: Iterable[RequestRecord], records: Iterable[RequestRecord]) -> Losslessness:
    """Compare greedy answers, paired by prompt and turn."""
    answers, unstable = _answers(reference)
    num_compared = num_without = num_unstable = num_different = 0
    differences: list[Difference] = []
    for record in records:
        key = (record.prompt_id, record.turn)
        if key in unstable:
            num_unstable += 1
        elif key not in answers:
            num_without += 1
        else:
            num_compared += 1
            if not agree(answers[key], _answer(record)):
                num_different += 1
                if len(differences) < MAX_LISTED:
                    differences.append(_difference(key, answers[key].text, record.text))
    return Losslessness(num_compared, num_different, num_without, num_unstable, differences)


def agree(first: Answer, second: Answer) -> bool:
    """Equal as far as both go: one that was cut at fewer tokens says nothing about the rest."""
    if first.is_cut and second.text.startswith(first.text):
        return True
    if second.is_cut and first.text.startswith(second.text):
        return True
    return first.text == second.text


def _answers(records: Iterable[RequestRecord]) -> tuple[Mapping[Key, Answer], set[Key]]:
    answers: dict[Key, Answer] = {}
    unstable: set[Key] = set()
    for record in records:
        answer = _answer(record)
        known = answers.setdefault((record.prompt_id, record.turn), answer)
        if not agree(known, answer):
            unstable.add((record.prompt_id, record.turn))
    return answers, unstable


def _answer(record: RequestRecord) -> Answer:
    return Answer(record.text, record.finish_reason == _CUT)


def _difference(key: Key, reference: str, found: str) -> Difference:
    pairs = enumerate(zip(reference, found, strict=False))
    first = next((index for index, (one, other) in pairs if one != other), min(len(reference), len(found)))
    start = max(first - 20, 0)
    return Difference(*key, first, reference[start : first + 40], found[start : first + 40])
