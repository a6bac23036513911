"""What an arm's run left, request by request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from loadtest.learning.benchmark import UNSEEN
from loadtest.measures import definitions
from loadtest.measures.run_directory import RunDirectory
from loadtest.measures.timeline import read_timeline
from loadtest.records import COMMITTED, RequestRecord, RunRecord, Swap, SystemSample
from loadtest.statistics import Interval

_TIMELINE_S = 60.0
"""Of a window of the counters; only sums over the run are taken of them."""
LEARNER = "learner"


@dataclass(frozen=True)
class Answer:
    """One request of the work as an arm answered it. Times are seconds since the arm's start."""

    index: int
    """In the work; the same request in every arm."""
    phase: str
    is_unseen: bool
    """Kept from the learner."""
    prompt_id: str
    is_ok: bool
    sent_at_s: float
    ended_at_s: float
    num_tokens: int
    accepted: tuple[int, ...]
    """Proposals accepted in each verify step; empty without speculation."""

    @property
    def took_s(self) -> float:
        return self.ended_at_s - self.sent_at_s


@dataclass(frozen=True)
class ArmRun:
    """Everything one arm did."""

    name: str
    answers: Mapping[int, Answer]
    """By index, in order."""
    swaps: tuple[Swap, ...]
    """Committed ones."""
    cpu_s: Mapping[str, float]
    """Processor seconds by process, where this machine could see them."""
    record: RunRecord | None

    def of_phase(self, phase: str) -> list[Answer]:
        return [answer for answer in self.answers.values() if answer.phase == phase]

    @property
    def phases(self) -> list[str]:
        return list(dict.fromkeys(answer.phase for answer in self.answers.values()))

    def span(self, phase: str) -> Interval:
        """From its first request to its last answer."""
        answers = self.of_phase(phase)
        return Interval(min(one.sent_at_s for one in answers), max(one.ended_at_s for one in answers))


def read_arm(name: str, directory: Path) -> ArmRun:
    """Raises RunDirectoryError or ConfigError where there is no run."""
    run = RunDirectory(directory)
    return arm_run(name, run.requests(), run.samples(), run.record)


def arm_run(
    name: str, requests: Iterable[RequestRecord], samples: Iterable[SystemSample] = (), record: RunRecord | None = None
) -> ArmRun:
    timeline = read_timeline(samples, _TIMELINE_S)
    cpu_s: dict[str, float] = {}
    for window in timeline.windows:
        for process, seconds in window.cpu_s.items():
            cpu_s[process] = cpu_s.get(process, 0.0) + seconds
    answers = sorted((_answer(request) for request in requests), key=lambda answer: answer.index)
    return ArmRun(
        name=name,
        answers={answer.index: answer for answer in answers},
        swaps=tuple(swap for swap in timeline.swaps if swap.outcome == COMMITTED),
        cpu_s=cpu_s,
        record=record,
    )


def _answer(request: RequestRecord) -> Answer:
    return Answer(
        index=request.index,
        phase=request.phase,
        is_unseen=request.lane == UNSEEN,
        prompt_id=request.prompt_id,
        is_ok=request.outcome == "ok",
        sent_at_s=request.sent_at_s,
        ended_at_s=request.ended_at_s,
        num_tokens=definitions.num_tokens(request),
        accepted=tuple(request.accepted_per_step or ()),
    )
