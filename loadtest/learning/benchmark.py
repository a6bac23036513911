"""Benchmark: fixed work, and the arms that do it. Read from TOML, nothing started.

Every arm gets the same requests in the same order, so that arms are compared request by request. What the numbers mean by the
names of arms: `none` is what speed-ups count against, `fresh` learns from nothing, `aurora` is the published recipe, `static` a
draft that stays as it is, `ours` the same draft learning on, `cold` a draft that knows nothing and stays so.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from loadtest.scenario import Closed, Lane, Phase, Positive, Scenario, anchored
from wire.config import Config, load_tables
from wire.errors import ConfigError

SHIPPED = Path(__file__).parent
RANDOM = "random"
STREAM, UNSEEN = "stream", "unseen"
"""The lane names of requests the learner may learn from, and of those kept from it."""

NONE, STATIC, OURS, FRESH, AURORA, COLD = "none", "static", "ours", "fresh", "aurora", "cold"
"""Arms that the bars name."""


class StreamPhase(Config):
    """A stretch of the work: so many requests, so many at a time."""

    name: str
    num_requests: Annotated[int, Field(ge=1)]
    """Those kept from the learner included."""
    concurrency: Annotated[int, Field(ge=1)] = 1
    traffic: dict[str, Positive]
    """As in a scenario."""
    end_traffic: dict[str, Positive] | None = None
    unseen_every: Annotated[int, Field(ge=0)] = 0
    """Every so many requests one of the source's held-out part, which the learner does not get; 0: none."""


class Arm(Config):
    """One system that does the work."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    method: Literal["none", "ngram", "suffix", "draft"]
    """How it speculates. All but `draft` are stock vLLM on the same cores, without gateway and learner."""
    draft: str = RANDOM
    """What a `draft` arm starts from: `random`, an earlier arm's name (the draft active at its end), or a checkpoint's path,
    which has a slash."""
    learns: bool = True
    """Whether a `draft` arm captures. Its learner's core is kept free in any case."""
    phases: Annotated[list[str], Field(min_length=1)] | None = None
    """Names of the phases it takes part in; all where absent."""
    settings: list[str] = Field(default_factory=list)
    """As `paceline up --set`."""


class Benchmark(Config):
    """The whole file."""

    name: str
    what: str
    seed: int = 0
    max_tokens: Annotated[int, Field(ge=1)] = 128
    settings: list[str] = Field(default_factory=list)
    """Of every arm, as `paceline up --set`."""
    phase: Annotated[list[StreamPhase], Field(min_length=1)]
    arm: Annotated[list[Arm], Field(min_length=1)]

    @model_validator(mode="after")
    def _is_sound(self) -> Benchmark:
        for kind, names in (("phases", [one.name for one in self.phase]), ("arms", [one.name for one in self.arm])):
            if len(set(names)) < len(names):
                raise ValueError(f"two {kind} have one name, among {names}")
        earlier: set[str] = set()
        for arm in self.arm:
            unknown = set(arm.phases or ()) - {phase.name for phase in self.phase}
            if unknown:
                raise ValueError(f"arm {arm.name} names phases that do not exist: {sorted(unknown)}")
            if arm.draft != RANDOM and "/" not in arm.draft and arm.draft not in earlier:
                raise ValueError(
                    f"arm {arm.name} starts from the draft of {arm.draft!r}, which is no arm with a draft before it; "
                    "a checkpoint's path needs a slash"
                )
            earlier |= {arm.name} if arm.method == "draft" else set()
        return self

    def phases_of(self, arm: Arm) -> list[StreamPhase]:
        """In the order of the file."""
        return [phase for phase in self.phase if arm.phases is None or phase.name in arm.phases]

    def find(self, name: str) -> Arm | None:
        return next((arm for arm in self.arm if arm.name == name), None)

    def gives_draft(self, arm: Arm) -> bool:
        """Whether another arm starts from where this one ends."""
        return any(other.draft == arm.name for other in self.arm)

    @classmethod
    def read(cls, path: Path, overrides: Sequence[str]) -> Benchmark:
        """Relative paths in it are meant from where it lies. Raises ConfigError that names each bad key."""
        tables = cls.build(load_tables([path], overrides), source=str(path)).model_dump()
        directory = path.absolute().parent
        for phase in tables["phase"]:
            for key in ("traffic", "end_traffic"):
                if phase[key] is not None:
                    phase[key] = {anchored(source, directory): weight for source, weight in phase[key].items()}
        for arm in tables["arm"]:
            if "/" in arm["draft"]:
                arm["draft"] = str(directory / arm["draft"])
        return cls.build(tables, source=str(path))


def locate(path: Path) -> Path:
    """The shipped benchmark where `path` is the bare name of one, else `path` itself; raises ConfigError where it is neither."""
    if path.suffix == ".toml" or len(path.parts) > 1 or path.is_file():
        return path
    names = sorted(found.stem for found in SHIPPED.glob("*.toml"))
    if path.name not in names:
        raise ConfigError(f"no file and no shipped benchmark is called {path.name!r}; there are {', '.join(names)}")
    return SHIPPED / f"{path.name}.toml"


def scenario(benchmark: Benchmark, arm: Arm, durations_s: Sequence[float]) -> Scenario:
    """The arm's work as a load test's scenario, its phases as long as they took: what reports of runs are made with."""
    phases = [
        scenario_phase(phase, duration_s) for phase, duration_s in zip(benchmark.phases_of(arm), durations_s, strict=True)
    ]
    lane = Lane(name=STREAM, phase=phases, max_tokens=benchmark.max_tokens)
    return Scenario(
        name=f"{benchmark.name}, {arm.name}",
        what=f"{benchmark.what} Arm {arm.name}: a fixed number of requests in each phase, however long they take.",
        seed=benchmark.seed,
        lane=[lane],
    )


def scenario_phase(phase: StreamPhase, duration_s: float) -> Phase:
    return Phase(
        name=phase.name,
        duration_s=duration_s,
        arrivals=Closed(concurrency=phase.concurrency),
        traffic=phase.traffic,
        end_traffic=phase.end_traffic,
    )
