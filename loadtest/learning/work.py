"""The work: every request of the benchmark in its order, drawn before any arm runs. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from loadtest.draws import Deck, Mix, generator
from loadtest.learning.benchmark import Benchmark, StreamPhase, scenario_phase
from loadtest.schedule import Planned, SizeOf, domain_of


@dataclass(frozen=True)
class PhaseWork:
    """One phase's requests. `Planned.index` counts over the whole benchmark, so it names the same request in every arm."""

    phase: StreamPhase
    requests: tuple[Planned, ...]


def plan_work(benchmark: Benchmark, size_of: SizeOf) -> list[PhaseWork]:
    """Every phase, whichever arms take part: an arm that leaves one out gets the same prompts in the others.

    Each source's prompts come round and round, all of them before one comes again.
    """
    decks: dict[tuple[str, str], Deck] = {}
    found: list[PhaseWork] = []
    first = 0
    for phase in benchmark.phase:
        mix = Mix(scenario_phase(phase, 1.0))
        uniforms = generator(benchmark.seed, "mix", phase.name)
        requests = []
        for number in range(phase.num_requests):
            split = "heldout" if phase.unseen_every and (number + 1) % phase.unseen_every == 0 else "train"
            source = mix.choose_one(number / phase.num_requests, uniforms.random())
            if (source, split) not in decks:
                draw = generator(benchmark.seed, domain_of(source), split)
                decks[source, split] = Deck(size_of(source, split), draw)
            requests.append(
                Planned(
                    index=first + number,
                    phase=scenario_phase(phase, 1.0).model_copy(update={"split": split}),
                    at_s=0.0,
                    source=source,
                    number=int(decks[source, split].take(1)[0]),
                )
            )
        found.append(PhaseWork(phase, tuple(requests)))
        first += phase.num_requests
    return found


def sources(benchmark: Benchmark) -> list[tuple[str, str]]:
    """Every source and split it asks for."""
    found: dict[tuple[str, str], None] = {}
    for phase in benchmark.phase:
        for source in Mix(scenario_phase(phase, 1.0)).names:
            found[source, "train"] = None
            if phase.unseen_every:
                found[source, "heldout"] = None
    return list(found)
