"""What an environment is: problems that are reset, stepped and scored, and the messages these exchange.

One episode is `reset` once, `step` once for every turn of the model, `score` at its end, then `close`. A question with one answer
is the special case of one step; a simulator observes after every action. Everything that leaves an environment is a frozen, versioned
message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

from msgspec import Struct

from rl.trajectory import RewardPart
from wire.errors import PacelineError

ENVIRONMENT_SCHEMA_VERSION = 1
"""Of the messages here and in `rl/environments/frames.py`; a worker of another version is refused."""

Split = Literal["train", "heldout"]
Info = Mapping[str, str | int | float | bool]
"""Diagnostics: they are reported, and decide nothing."""


class EnvironmentFailed(PacelineError):
    """The environment, not the model, is at fault: the episode is excluded from training, and the run goes on."""

    code = "environment_failed"


class Problem(Struct, frozen=True):
    """Which problem of which environment. The same one is the same episode wherever and whenever it is started."""

    environment: str
    """The name the configuration gives it."""
    seed: int
    split: Split = "train"

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"the seed of a problem is 0 or more, got {self.seed}")


class ChatMessage(Struct, frozen=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: str


class Chat(Struct, frozen=True, tag="chat"):
    """Messages that are new since the last turn of the model; the target's chat template renders them."""

    messages: tuple[ChatMessage, ...]


class Text(Struct, frozen=True, tag="text"):
    """Plain text to go on from, without a chat template: a few-shot prompt."""

    text: str


class Tokens(Struct, frozen=True, tag="tokens"):
    """Token ids that are new since the last turn of the model."""

    token_ids: tuple[int, ...]


Observation = Chat | Text | Tokens


class Action(Struct, frozen=True):
    """One turn of the model."""

    text: str
    token_ids: tuple[int, ...] = ()
    is_truncated: bool = False
    """It ran into its token limit: the model did not end it."""

    def __post_init__(self) -> None:
        if not self.text.isascii():
            try:
                self.text.encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"a turn of the model is no Unicode text: {error}; decode its tokens with 'replace'") from None


class Step(Struct, frozen=True, tag="step"):
    """What a reset or a step leads to."""

    observation: Observation | None
    """None once the episode is done: there is nothing to answer."""
    is_done: bool = False
    is_truncated: bool = False
    """A limit ended the episode, of turns or of tokens, and not the model or the environment."""
    info: Info = {}

    def __post_init__(self) -> None:
        if self.is_done != (self.observation is None):
            raise ValueError(
                f"a step is done exactly when it observes nothing, got is_done={self.is_done}, {self.observation!r}"
            )


class Scored(Struct, frozen=True, tag="scored"):
    """An episode that counts. The values of its parts are in [0, 1], their weights 0 or more."""

    parts: tuple[RewardPart, ...]
    is_truncated: bool = False
    info: Info = {}
    reference: str | None = None
    """The right answer, as it may stand at the end of what the model says; None where there is none, or it stands elsewhere. Where there
    is one, the first part is 1 for a right answer."""

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("a scored episode has at least one reward part")
        for part in self.parts:
            if not 0.0 <= part.value <= 1.0:
                raise ValueError(
                    f"reward part {part.name!r} is {part.value!r}, outside [0, 1]; the environment has to scale it"
                )
            if part.weight < 0.0:
                raise ValueError(f"the weight of reward part {part.name!r} is {part.weight!r}; it has to be 0 or more")

    @property
    def reward(self) -> float:
        """In [0, 1] where the weights add up to 1."""
        return sum(part.value * part.weight for part in self.parts)


class Excluded(Struct, frozen=True, tag="excluded"):
    """The environment failed: neither reward 0 nor a crash, but an episode that takes no part in training."""

    reason: Literal["failed", "crashed", "unresponsive", "worker_died", "not_reproducible"]
    """`failed`: it said so; `crashed`: it raised anything else; `not_reproducible`: it went another way from the same seed."""
    detail: str


class Episode(Protocol):
    """One problem being worked on. `reset` made it; it holds whatever state the environment needs."""

    @property
    def first(self) -> Step:
        """What the model sees first."""
        ...

    async def step(self, action: Action) -> Step:
        """Take a turn of the model. Anything raised excludes the episode."""
        ...

    async def score(self) -> Scored:
        """The verdict; called once, after a step that is done, or earlier where whoever plays gives up."""
        ...

    async def close(self) -> None:
        """Give back what it holds; called once at its end, whether it was scored or not."""
        ...


class Environment(Protocol):
    """A family of problems. It is built in a worker process, once, and plays many episodes at a time."""

    async def reset(self, seed: int, split: Split) -> Episode:
        """The episode of a seed. All its randomness comes from the seed, so that it can be begun again."""
        ...

    async def close(self) -> None:
        """Give back processes and files."""
        ...
