"""Scenario: what a load test sends, when, and what is done to the system meanwhile. Read from TOML, nothing started.

A scenario has lanes that run side by side (users, rollouts); a lane goes through phases one after the other; actions happen
at fixed times. Everything that is random is drawn from `seed` before the run, so that two runs send the same requests.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import Field, field_validator, model_validator

from loadtest.records import MAX_RUN_S
from wire.config import Config, load_tables
from wire.errors import ConfigError

SHIPPED = Path(__file__).parent / "scenarios"

MAX_PLANNED = 20_000_000
"""Requests whose times are drawn before a run, of all lanes: about 100 bytes each."""
_MAX_CONCURRENCY = 100_000
_MAX_TOKENS = 1 << 31
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]


class Poisson(Config):
    """Open loop, independent arrivals; `burstiness` below 1 clusters them (gamma with that shape), above 1 evens them out."""

    kind: Literal["poisson"] = "poisson"
    rate_per_s: Positive
    burstiness: Annotated[float, Field(ge=0.001, le=1e6)] = 1.0
    end_rate_per_s: Positive | None = None
    """The rate reached at the end of the phase, linearly; without it the rate is constant."""


class Trace(Config):
    """Open loop by a Mooncake-style trace: JSON lines with `timestamp` (ms), `input_length`, `output_length`, `hash_ids`."""

    kind: Literal["trace"] = "trace"
    path: Path
    time_scale: Positive = 1.0
    """Seconds of the run per second of the trace."""
    length_scale: Positive = 1.0
    """Tokens sent per token of the trace, prompt and answer alike."""


class Closed(Config):
    """Closed loop: that many requests, or conversations, at a time. Says nothing about waiting: those who would have come meanwhile do not."""

    kind: Literal["closed"] = "closed"
    concurrency: Annotated[int, Field(ge=1, le=_MAX_CONCURRENCY)]


Arrivals = Annotated[Poisson | Trace | Closed, Field(discriminator="kind")]


class Phase(Config):
    """A stretch of a lane."""

    name: str
    duration_s: Annotated[float, Field(gt=0.0, le=MAX_RUN_S)]
    arrivals: Arrivals
    traffic: Annotated[dict[str, Positive], Field(min_length=1)]
    """Weight of each source (`human_eval`, `sharegpt`, `reasoning_gym`, `tool_calls`, or a path to JSON lines of OpenAI messages,
    which has a slash or ends in `.jsonl` or `.json`)."""
    end_traffic: Annotated[dict[str, Positive], Field(min_length=1)] | None = None
    """Weights reached at the end of the phase, linearly: a gradual shift."""
    split: Literal["train", "heldout"] = "train"


class Turns(Config):
    """Conversations instead of single requests: the user's turns of the prompt, then follow-up questions.

    The later turns are due a pause after the end of the answer before; a turn that fails, or whose client leaves, is the last.
    """

    number: Annotated[int, Field(ge=1)]
    mean_think_time_s: Annotated[float, Field(ge=0.0)] = 0.0
    """The user's pause before each later turn, exponential."""


class Cancel(Config):
    """Clients that leave."""

    share: Share
    mean_after_s: Positive
    """After the request was sent, exponential."""


class Lane(Config):
    """One population of clients."""

    name: str
    phase: Annotated[list[Phase], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, le=_MAX_TOKENS)] = 128
    length_key: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """What the server calls that bound in a request's body; some know only the second."""
    answer_timeout_s: Annotated[float, Field(gt=0.0, le=MAX_RUN_S)] | None = None
    """An answer without an end by then, from when it was sent, has failed. By default 3 minutes and 2 s for each token it may have, so that
    an endless stream ends and a slow one does not."""
    temperature: Annotated[float, Field(ge=0.0)] = 0.0
    options: dict[str, Any] = Field(default_factory=dict)
    """More fields of the request's body. With vLLM, `return_token_ids = true` has the tokens of every chunk counted one by one;
    else a chunk counts for one token unless the server keeps a running count."""
    headers: dict[str, str] = Field(default_factory=dict)
    """More headers. Sent unless given here: `X-Paceline-Domain`, the source's label; `X-Session-Id`, in conversations; and
    `X-Paceline-Capture: off` with held-out prompts, which must stay unknown to the learner."""
    turns: Turns | None = None
    cancel: Cancel | None = None

    @field_validator("options")
    @classmethod
    def _is_json(cls, options: dict[str, Any]) -> dict[str, Any]:
        if msgspec.json.decode(msgspec.json.encode(options)) != options:
            raise ValueError(
                "a request's body is JSON, which has texts, numbers, booleans, lists and tables, and neither dates nor nan"
            )
        return options

    @field_validator("headers")
    @classmethod
    def _can_be_sent(cls, headers: dict[str, str]) -> dict[str, str]:
        for name, value in headers.items():
            if not _HEADER_NAME.fullmatch(name) or not value.isprintable():
                raise ValueError(f"{name!r} with the value {value!r} is no header of HTTP")
        return headers


class Action(Config):
    """Something done to the system through its admin API, or to its processes."""

    at_s: Annotated[float, Field(ge=0.0)]
    do: Literal["swap", "rollback", "drain", "undrain", "kill", "pause_learner", "resume_learner"]
    """`swap` activates the newest other draft, `kill` sends SIGKILL."""
    process: str = ""
    """The engine or role, for `drain`, `undrain` and `kill`."""
    every_s: Annotated[float, Field(ge=0.01)] | None = None
    """Again and again, until the run ends or `until_s`."""
    until_s: Positive | None = None

    @model_validator(mode="after")
    def _names_a_process(self) -> Action:
        if self.do in ("drain", "undrain", "kill") and not self.process:
            raise ValueError(f"the action {self.do!r} needs a process, such as process = 'engine-0'")
        return self


class Slo(Config):
    """What a request must keep to count for goodput; what is left out always holds."""

    ttft_ms: Positive | None = None
    tpot_ms: Positive | None = None
    e2e_ms: Positive | None = None


class Cut(Config):
    """Left out of every number, at both ends of the run."""

    warm_up_s: Annotated[float, Field(ge=0.0)] = 0.0
    cool_down_s: Annotated[float, Field(ge=0.0)] = 0.0


class Scenario(Config):
    """The whole file."""

    keys_are_told_in: ClassVar[str] = "loadtest/scenario.py"

    name: str
    what: str
    """One sentence for people."""
    seed: int = 0
    lane: Annotated[list[Lane], Field(min_length=1)]
    action: list[Action] = Field(default_factory=list)
    slo: Slo = Slo()
    cut: Cut = Cut()
    max_dispatch_lag_p99_ms: Positive = 20.0
    """A run whose sender lags behind its schedule by more than this is invalid: it measured itself."""
    max_busy_share: Positive = 0.9
    """A run with a closed loop whose load tester needed more of a core than this is invalid too: it was the limit."""

    @model_validator(mode="after")
    def _is_sound(self) -> Scenario:
        names = [lane.name for lane in self.lane]
        if len(set(names)) < len(names):
            raise ValueError(f"two lanes have one name, among {names}")
        if self.cut.warm_up_s + self.cut.cool_down_s >= self.duration_s:
            raise ValueError(f"warm-up and cool-down leave nothing of a run of {self.duration_s:g} s")
        if self.duration_s > MAX_RUN_S:
            raise ValueError(f"the run would take {self.duration_s:g} s, more than {MAX_RUN_S:g} s")
        if (number := self._num_expected()) > MAX_PLANNED:
            raise ValueError(
                f"about {number:.3g} requests would be sent, more than {MAX_PLANNED:,}: lower a rate or a duration"
            )
        late = [action.at_s for action in self.action if action.at_s >= self.duration_s]
        if late:
            raise ValueError(f"an action at {late[0]:g} s comes after the end, at {self.duration_s:g} s")
        return self

    def _num_expected(self) -> float:
        """Requests of Poisson arrivals; a trace is as long as its file."""
        return sum(
            (phase.arrivals.rate_per_s + (phase.arrivals.end_rate_per_s or phase.arrivals.rate_per_s)) / 2 * phase.duration_s
            for lane in self.lane
            for phase in lane.phase
            if isinstance(phase.arrivals, Poisson)
        )

    @property
    def has_closed_loop(self) -> bool:
        return any(isinstance(phase.arrivals, Closed) for lane in self.lane for phase in lane.phase)

    @property
    def duration_s(self) -> float:
        """Of the longest lane."""
        return max(sum(phase.duration_s for phase in lane.phase) for lane in self.lane)

    @classmethod
    def read(cls, path: Path, overrides: list[str]) -> Scenario:
        """Relative paths in it are meant from where it lies. Raises ConfigError that names each bad key."""
        tables = cls.build(load_tables([path], overrides), source=str(path)).model_dump()
        directory = path.absolute().parent
        for phase in (phase for lane in tables["lane"] for phase in lane["phase"]):
            if phase["arrivals"]["kind"] == "trace":
                phase["arrivals"]["path"] = directory / phase["arrivals"]["path"]
            for key in ("traffic", "end_traffic"):
                if phase[key] is not None:
                    phase[key] = {anchored(source, directory): weight for source, weight in phase[key].items()}
        return cls.build(tables, source=str(path))


def locate(path: Path) -> Path:
    """The shipped scenario where `path` is the bare name of one, else `path` itself; raises ConfigError where it is neither."""
    if path.suffix == ".toml" or len(path.parts) > 1 or path.is_file():
        return path
    names = sorted(found.stem for found in SHIPPED.glob("*.toml"))
    if path.name not in names:
        raise ConfigError(f"no file and no shipped scenario is called {path.name!r}; there are {', '.join(names)}")
    return SHIPPED / f"{path.name}.toml"


def is_file(source: str) -> bool:
    """Whether a source is a path and not a name."""
    return "/" in source or source.endswith((".jsonl", ".json"))


def anchored(source: str, directory: Path) -> str:
    return str(directory / source) if is_file(source) else source
