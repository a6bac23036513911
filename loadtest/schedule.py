"""The schedule: what a lane sends and when, fixed before the run. Pure: the same scenario and sources give the same list.

An open loop is planned to the last request. A closed loop sends when an answer is there, so only the order of its prompts is
fixed; where its mix of sources shifts, the moment decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from loadtest.draws import Deck, Floats, Integers, Mix, arrival_times, generator
from loadtest.scenario import Closed, Lane, Phase, Poisson, Scenario, Trace, is_file
from loadtest.traces import MAX_TOKENS, Recording, TraceRow, read_trace
from loadtest.traffic import TrafficError

SizeOf = Callable[[str, str], int]
"""Number of prompts of a source and a split; at least 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One request, or one conversation."""

    index: int
    """Of its lane, from 0."""
    phase: Phase
    at_s: float
    """When it has to be sent; seconds since the run's start."""
    source: str
    number: int
    """Of the prompt, in its source's split."""
    row: TraceRow | None = None
    """Whose lengths it has, where it comes of a trace."""


@dataclass(frozen=True)
class _Stretch:
    """The plan of one open phase, in arrays: a long schedule stays small."""

    phase: Phase
    times_s: Floats
    names: list[str]
    choices: Integers
    numbers: Integers
    rows: list[TraceRow] | None


class LanePlan:
    """What one lane sends."""

    def __init__(self, lane: Lane, seed: int, size_of: SizeOf) -> None:
        """Raises TrafficError where a trace cannot be read."""
        self.lane = lane
        self.num_broken_rows = 0
        """Of its traces."""
        self.starts_s = [0.0, *np.cumsum([phase.duration_s for phase in lane.phase]).tolist()]
        """Of each phase, and the lane's end."""
        self._seed = seed
        self._size_of = size_of
        self._decks: dict[tuple[str, str], Deck] = {}
        self._stretches = [
            self._plan(phase, start_s)
            for phase, start_s in zip(lane.phase, self.starts_s[:-1], strict=True)
            if not isinstance(phase.arrivals, Closed)
        ]
        self._uniforms = generator(seed, lane.name, "closed")
        self._closed_mixes: dict[float, Mix] = {}
        """By the start of their phase."""
        self._num_planned = len(self)

    def __len__(self) -> int:
        """Requests or conversations planned; those of closed loops are not."""
        return sum(len(stretch.times_s) for stretch in self._stretches)

    @property
    def end_s(self) -> float:
        return self.starts_s[-1]

    def planned(self) -> Iterator[Planned]:
        """The open loop, in time order."""
        index = 0
        for stretch in self._stretches:
            for position, at_s in enumerate(stretch.times_s.tolist()):
                yield Planned(
                    index=index,
                    phase=stretch.phase,
                    at_s=at_s,
                    source=stretch.names[stretch.choices[position]],
                    number=int(stretch.numbers[position]),
                    row=stretch.rows[position] if stretch.rows is not None else None,
                )
                index += 1

    def phase_at(self, at_s: float) -> tuple[Phase, float] | None:
        """The phase at that time and its start; None after the last."""
        for phase, start_s, end_s in zip(self.lane.phase, self.starts_s, self.starts_s[1:], strict=False):
            if at_s < end_s:
                return phase, start_s
        return None

    def next_closed(self, phase: Phase, start_s: float, at_s: float) -> Planned:
        """The next request of a closed loop, sent at `at_s`."""
        if start_s not in self._closed_mixes:
            self._closed_mixes[start_s] = Mix(phase)
        source = self._closed_mixes[start_s].choose_one((at_s - start_s) / phase.duration_s, self._uniforms.random())
        number = int(self._deck(source, phase.split).take(1)[0])
        self._num_planned += 1
        return Planned(index=self._num_planned - 1, phase=phase, at_s=at_s, source=source, number=number)

    def _plan(self, phase: Phase, start_s: float) -> _Stretch:
        draw = generator(self._seed, self.lane.name, start_s, phase.name)
        times_s, recording = _arrivals(phase, draw)
        mix = Mix(phase)
        choices = mix.choose(times_s / phase.duration_s, draw.random(len(times_s)))
        numbers = np.zeros(len(times_s), dtype=np.int64)
        for index, name in enumerate(mix.names):
            is_chosen = choices == index
            numbers[is_chosen] = self._deck(name, phase.split).take(int(is_chosen.sum()))
        self.num_broken_rows += recording.num_broken if recording else 0
        return _Stretch(phase, times_s + start_s, mix.names, choices, numbers, recording.rows if recording else None)

    def _deck(self, source: str, split: str) -> Deck:
        key = (source, split)
        if key not in self._decks:
            # By the label, so that it does not matter where a file lies.
            draw = generator(self._seed, self.lane.name, domain_of(source), split)
            self._decks[key] = Deck(self._size_of(source, split), draw)
        return self._decks[key]


def plan(scenario: Scenario, size_of: SizeOf) -> list[LanePlan]:
    """Every lane's plan; raises TrafficError where a trace cannot be read."""
    return [LanePlan(lane, scenario.seed, size_of) for lane in scenario.lane]


def sources(scenario: Scenario) -> list[tuple[str, str]]:
    """Every source and split that a scenario asks for."""
    phases = [phase for lane in scenario.lane for phase in lane.phase]
    return list(dict.fromkeys((name, phase.split) for phase in phases for name in Mix(phase).names))


def domain_of(source: str) -> str:
    """The label of a source: its name, of a file the file's name without its ending."""
    return label(Path(source).stem if is_file(source) else source)


def label(text: str) -> str:
    """A text as our gateway takes it in a header."""
    return "".join(letter if letter.isascii() and (letter.isalnum() or letter in "._:-") else "_" for letter in text)[:64]


def _arrivals(phase: Phase, draw: np.random.Generator) -> tuple[Floats, Recording | None]:
    match phase.arrivals:
        case Poisson() as arrivals:
            return arrival_times(arrivals, phase.duration_s, draw), None
        case Trace() as arrivals:
            recording = read_trace(arrivals.path, before_ms=phase.duration_s / arrivals.time_scale * 1000)
            longest = max((max(row.input_length, row.output_length) for row in recording.rows), default=0)
            if longest * arrivals.length_scale > MAX_TOKENS:
                raise TrafficError(
                    f"{arrivals.path}: with length_scale = {arrivals.length_scale:g} a request would have "
                    f"{longest * arrivals.length_scale:.3g} tokens, more than {MAX_TOKENS:,}"
                )
            return np.array([row.at_s(arrivals.time_scale) for row in recording.rows]), recording
        case _:
            raise AssertionError(f"{phase.arrivals} is not an open loop")
