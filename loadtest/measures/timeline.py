"""The system's own counters over the run, in windows of equal length."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from loadtest.measures import definitions
from loadtest.measures.histogram import Ints
from loadtest.records import EngineSample, RequestRecord, Swap, SystemSample

_NICE_LENGTHS_S = (1.0, 2.0, 5.0, 10.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
_MAX_WINDOWS = 120

Source = tuple[str, str]
"""Domain label and draft version."""


def window_length_s(duration_s: float) -> float:
    """A round length, so that a run has 120 windows at most."""
    return next((length for length in _NICE_LENGTHS_S if duration_s <= length * _MAX_WINDOWS), _NICE_LENGTHS_S[-1])


def increase(before: float, after: float) -> float:
    """Of a counter that starts from 0 when its process does."""
    return after - before if after >= before else after


@dataclass
class Verified:
    """Verify steps, and proposals accepted in them at each position."""

    steps: float = 0.0
    accepted: list[float] = field(default_factory=list)
    proposed: float = 0.0
    """Over all positions; 0 where nobody counts them."""

    def add(self, steps: float, accepted: Iterable[float], proposed: float = 0.0) -> None:
        self.steps += steps
        self.proposed += proposed
        for position, count in enumerate(accepted):
            if position == len(self.accepted):
                self.accepted.append(0.0)
            self.accepted[position] += count

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per verify step; None without a step."""
        return 1.0 + sum(self.accepted) / self.steps if self.steps > 0 else None

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of verify steps whose proposal at this position was accepted."""
        return [count / self.steps for count in self.accepted] if self.steps > 0 else []


def pooled(parts: Iterable[Verified]) -> Verified:
    whole = Verified()
    for part in parts:
        whole.add(part.steps, part.accepted, part.proposed)
    return whole


@dataclass
class Window:
    """What the counters grew by within one window, and the last reading of the gauges."""

    start_s: float
    end_s: float
    verified: dict[Source, Verified] = field(default_factory=lambda: defaultdict(Verified))
    completion_tokens: float = 0.0
    prompt_tokens: float = 0.0
    cpu_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    gpu_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    kv_paths: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    active_version: int | None = None
    engines: dict[str, EngineSample] = field(default_factory=dict)
    learner_loss: float | None = None

    def of_domain(self, domain: str | None) -> Verified:
        """Over all draft versions; of every domain without a name."""
        return pooled(verified for (label, _), verified in self.verified.items() if domain in (None, label))


@dataclass
class Timeline:
    """Windows without a gap from the run's start, and the swaps."""

    length_s: float
    windows: list[Window] = field(default_factory=list)
    swaps: list[Swap] = field(default_factory=list)
    num_samples: int = 0

    @property
    def domains(self) -> list[str]:
        """Labels that any verify step was made under."""
        return sorted({domain for window in self.windows for domain, _ in window.verified})


def read_timeline(samples: Iterable[SystemSample], length_s: float) -> Timeline:
    """What grew between two samples belongs to the window in the middle of them."""
    timeline = Timeline(length_s)
    before: SystemSample | None = None
    for sample in samples:
        timeline.num_samples += 1
        timeline.swaps += sample.swaps
        window = _window_at(timeline, sample.at_s)
        window.active_version = sample.active_version
        window.engines = sample.engines
        window.learner_loss = sample.learner_loss
        if before is not None:
            _add_growth(_window_at(timeline, (before.at_s + sample.at_s) / 2), before, sample)
        before = sample
    return timeline


class VerifiedRequests:
    """The same from what engines tell of each request that was answered to its end."""

    def __init__(self, length_s: float) -> None:
        self.timeline = Timeline(length_s)

    def watch(self, records: Iterable[RequestRecord]) -> Iterator[RequestRecord]:
        """Pass the records on; each verify step belongs to the window in which its last token came."""
        for record in records:
            if record.accepted_per_step and record.chunk_times_s:
                self._add(record, np.asarray(record.accepted_per_step))
            yield record

    def _add(self, record: RequestRecord, accepted: Ints) -> None:
        drafted = record.drafted_per_step or []
        proposed = np.asarray(drafted if len(drafted) == len(accepted) else np.zeros(len(accepted)))
        # A position at which nothing was accepted is a position all the same.
        positions = np.arange(max(record.num_spec_tokens or 0, *drafted, accepted.max()))
        of_step = np.maximum(definitions.verify_times_s(record) // self.timeline.length_s, 0).astype(np.int64)
        for number in np.unique(of_step):
            chosen = of_step == number
            counts = (accepted[chosen, None] > positions).sum(axis=0)
            window = _window_at(self.timeline, float(number * self.timeline.length_s))
            window.verified[record.domain, record.draft_version or "unknown"].add(
                float(chosen.sum()), map(float, counts), float(proposed[chosen].sum())
            )


def take_verified(timeline: Timeline, requests: Timeline) -> str:
    """Let the requests fill in for counters that know less; returns what AL is measured by: `counters`, `requests`, `nothing`."""
    if len(timeline.domains) > 1 or len(timeline.domains) >= len(requests.domains):
        return "counters" if timeline.domains else "nothing"
    for window in timeline.windows:
        window.verified.clear()
    for window in requests.windows:
        _window_at(timeline, window.start_s).verified = window.verified
    return "requests"


def _window_at(timeline: Timeline, at_s: float) -> Window:
    number = max(int(at_s // timeline.length_s), 0)
    while len(timeline.windows) <= number:
        start_s = len(timeline.windows) * timeline.length_s
        timeline.windows.append(Window(start_s, start_s + timeline.length_s))
    return timeline.windows[number]


def _add_growth(window: Window, before: SystemSample, after: SystemSample) -> None:
    for domain, by_version in after.steps.items():
        for version, steps in by_version.items():
            old_steps = before.steps.get(domain, {}).get(version, 0.0)
            counts = after.accepted.get(domain, {}).get(version, [])
            old_counts = before.accepted.get(domain, {}).get(version, [])
            old_counts = old_counts + [0.0] * (len(counts) - len(old_counts))
            grown = [increase(old, new) for old, new in zip(old_counts, counts, strict=False)]
            old_proposed = before.proposed.get(domain, {}).get(version, 0.0)
            proposed = after.proposed.get(domain, {}).get(version, 0.0)
            window.verified[domain, version].add(increase(old_steps, steps), grown, increase(old_proposed, proposed))
    window.completion_tokens += increase(before.completion_tokens, after.completion_tokens)
    window.prompt_tokens += increase(before.prompt_tokens, after.prompt_tokens)
    for process, seconds in after.cpu_s.items():
        # A process that was not seen before brings the seconds of its start along; only what is seen to grow counts.
        window.cpu_s[process] += increase(before.cpu_s.get(process, seconds), seconds)
    for gpu, seconds in after.gpu_s.items():
        window.gpu_s[gpu] += increase(before.gpu_s.get(gpu, seconds), seconds)
    for path, number in after.kv_paths.items():
        window.kv_paths[path] += increase(before.kv_paths.get(path, 0.0), number)
