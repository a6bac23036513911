"""What one rollout was: which tokens, which weights made each of them, with which probability, and what it earned.

A rollout is one run through an environment; its record is a trajectory: one turn, or several where the environment answers.
Turn k's prompt is everything before it, token by token (earlier prompts and outputs, then its own `prompt_token_ids`), so that
nothing is ever tokenized again. The rollouts of one prompt make up a group.

Everything is checked when it is made and when it is decoded: RolloutError, inside msgspec's ValidationError while decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import isfinite

import msgspec
from msgspec import Struct

from wire.errors import RolloutError, SchemaMismatch
from wire.spec import SCHEMA_VERSION


class WeightSpan(Struct, frozen=True, kw_only=True):
    """Output tokens [start, end) of one turn, which the target of one version made."""

    target_version: int
    start: int
    end: int


class RewardPart(Struct, frozen=True):
    """One term of a reward: it adds `weight * value`. A term with weight 0 is watched, not learned from.

    Environments give values in [0, 1] (`Scored` refuses others); what is added to a finished rollout may lie elsewhere.
    """

    name: str
    value: float
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not (isfinite(self.value) and isfinite(self.weight)):
            raise RolloutError(
                f"reward part {self.name!r} is {self.value} with weight {self.weight}; an environment that cannot tell a finite "
                "reward has failed and says so in `failure`"
            )


class Timings(Struct, frozen=True, kw_only=True):
    """When a rollout went through its stations, Unix time."""

    submitted_s: float
    generated_s: float
    """Its last token was there."""
    scored_s: float

    def __post_init__(self) -> None:
        if not self.submitted_s <= self.generated_s <= self.scored_s:
            raise RolloutError(
                f"a rollout was submitted at {self.submitted_s}, generated at {self.generated_s}, scored at {self.scored_s}: "
                "its times run backwards; take all three from one clock"
            )


class Turn(Struct, frozen=True, kw_only=True):
    """One answer of the policy and what was put before it."""

    prompt_token_ids: tuple[int, ...]
    """What came before this answer and after the last turn's: the task, or the environment's reply to the last answer."""
    output_token_ids: tuple[int, ...]
    behaviour_logprobs: tuple[float, ...]
    """Natural log-probability of each output token under the distribution it was drawn from, temperature included."""
    weight_spans: tuple[WeightSpan, ...]
    draft_version: int | None
    """Of the draft that was active when the turn began; None: no speculation."""
    finish_reason: str
    """The engine's: `stop`, `length` or `abort`."""

    def __post_init__(self) -> None:
        num_tokens = len(self.output_token_ids)
        if num_tokens == 0:
            raise RolloutError("a turn has no output tokens; a rollout that never began is no trajectory, leave it out")
        if len(self.behaviour_logprobs) != num_tokens:
            raise RolloutError(
                f"a turn has {num_tokens} output tokens and {len(self.behaviour_logprobs)} behaviour log-probabilities; "
                "ask the engine for `logprobs` and keep one of each token"
            )
        _require_token_ids("prompt", self.prompt_token_ids)
        _require_token_ids("output", self.output_token_ids)
        _require_logprobs(self.behaviour_logprobs)
        _require_cover(self.weight_spans, num_tokens)
        if self.finish_reason not in _FINISH_REASONS:
            raise RolloutError(f"a turn ended with {self.finish_reason!r}; it is one of {', '.join(_FINISH_REASONS)}")

    @property
    def oldest_version(self) -> int:
        return min(span.target_version for span in self.weight_spans)


class Trajectory(Struct, frozen=True, kw_only=True, tag="trajectory"):
    """generator -> trainer, and on disk for replay: one scored rollout, or one whose environment failed."""

    schema_version: int
    group_id: int
    sample_index: int
    """Counts the rollouts of one group from 0."""
    environment: str
    environment_seed: int
    temperature: float
    turns: tuple[Turn, ...]
    reward_parts: tuple[RewardPart, ...]
    timings: Timings
    failure: str | None = None
    """What the environment failed with. Such a rollout has no reward and nothing is learned from it."""
    forked_from: int | None = None
    """Sample index of the trajectory this one goes on from, where the chat template rendered what was said before in other tokens: its
    prompt is the whole conversation then, and both have the reward of the one episode. None: it began as its group did."""
    reference: str | None = None
    """The environment's right answer, where it has one in words."""

    def __post_init__(self) -> None:
        who = f"sample {self.sample_index} of group {self.group_id}"
        if self.schema_version != SCHEMA_VERSION:
            raise SchemaMismatch(
                f"{who} is of schema {self.schema_version}, this process reads {SCHEMA_VERSION}; use the release that wrote it"
            )
        if self.group_id < 0 or self.sample_index < 0:
            raise RolloutError(f"{who}: ids count from 0")
        if self.forked_from is not None and not 0 <= self.forked_from < self.sample_index:
            raise RolloutError(f"{who} is forked from sample {self.forked_from}; it goes on from one before it")
        if not (isfinite(self.temperature) and self.temperature >= 0.0):
            raise RolloutError(f"{who} was drawn at temperature {self.temperature}; it is a finite number, 0 or more")
        if not self.turns:
            raise RolloutError(f"{who} has no turns; a rollout that never began is no trajectory, leave it out")
        if not self.turns[0].prompt_token_ids:
            raise RolloutError(f"{who} begins with an empty prompt; keep the prompt's token ids with the first turn")
        if (self.failure is None) != bool(self.reward_parts):
            raise RolloutError(
                f"{who} has {len(self.reward_parts)} reward parts and failure {self.failure!r}; it has rewards or it failed"
            )

    @property
    def reward(self) -> float:
        """Weighted sum of its parts; raises RolloutError where the environment failed."""
        if self.failure is not None:
            raise RolloutError(
                f"sample {self.sample_index} of group {self.group_id} has no reward ({self.failure}); "
                "leave failed rollouts out of what is learned from"
            )
        return sum(part.weight * part.value for part in self.reward_parts)

    @property
    def oldest_version(self) -> int:
        """Of the target that made its oldest token."""
        return min(turn.oldest_version for turn in self.turns)

    @property
    def num_output_tokens(self) -> int:
        return sum(len(turn.output_token_ids) for turn in self.turns)

    @property
    def num_spans(self) -> int:
        """Stretches of one version; 1 where no update fell into it."""
        versions = self.token_versions
        return 1 + sum(before != after for before, after in pairwise(versions))

    @property
    def token_versions(self) -> list[int]:
        """The target's version for each output token, over all turns."""
        spans = (span for turn in self.turns for span in turn.weight_spans)
        return [span.target_version for span in spans for _ in range(span.end - span.start)]

    @property
    def is_truncated(self) -> bool:
        """The last answer ended because it was too long."""
        return self.turns[-1].finish_reason == "length"


class Group(Struct, frozen=True, kw_only=True, tag="group"):
    """All the rollouts of one prompt, in the order of their sample index."""

    trajectories: tuple[Trajectory, ...]

    def __post_init__(self) -> None:
        if not self.trajectories:
            raise RolloutError("a group has no rollouts; evict it, so that it is refilled")
        first = self.trajectories[0]
        for index, trajectory in enumerate(self.trajectories):
            if trajectory.sample_index != index:
                raise RolloutError(
                    f"rollout {index} of group {first.group_id} calls itself sample {trajectory.sample_index}; "
                    "a group holds each of its samples once, in order"
                )
            for name in ("group_id", "environment", "environment_seed"):
                if getattr(trajectory, name) != getattr(first, name):
                    raise RolloutError(
                        f"sample {index} of group {first.group_id} has {name} {getattr(trajectory, name)!r}, the first has "
                        f"{getattr(first, name)!r}; only rollouts of one prompt are compared with one another"
                    )
            if trajectory.forked_from is None and trajectory.turns[0].prompt_token_ids != first.turns[0].prompt_token_ids:
                raise RolloutError(f"sample {index} of group {first.group_id} has a prompt of its own; a group shares one")

    @property
    def group_id(self) -> int:
        return self.trajectories[0].group_id

    @property
    def environment(self) -> str:
        return self.trajectories[0].environment

    @property
    def environment_seed(self) -> int:
        return self.trajectories[0].environment_seed

    @property
    def oldest_version(self) -> int:
        return min(trajectory.oldest_version for trajectory in self.trajectories)

    @property
    def rollouts(self) -> tuple[tuple[Trajectory, ...], ...]:
        """The trajectories of each rollout: one, and those forked from it."""
        first_of: list[int] = []
        found: dict[int, list[Trajectory]] = {}
        for trajectory in self.trajectories:
            origin = trajectory.forked_from
            first_of.append(trajectory.sample_index if origin is None else first_of[origin])
            found.setdefault(first_of[-1], []).append(trajectory)
        return tuple(tuple(each) for each in found.values())

    @property
    def scored(self) -> tuple[Trajectory, ...]:
        """Those whose environment did not fail."""
        return tuple(trajectory for trajectory in self.trajectories if trajectory.failure is None)

    @property
    def scored_rollouts(self) -> tuple[tuple[Trajectory, ...], ...]:
        """The trajectories of each rollout whose environment did not fail."""
        return tuple(rollout for rollout in self.rollouts if all(trajectory.failure is None for trajectory in rollout))


def num_output_tokens(rollout: Sequence[Trajectory]) -> int:
    """Of all trajectories of one rollout."""
    return sum(trajectory.num_output_tokens for trajectory in rollout)


def encode_group(group: Group) -> bytes:
    return msgspec.msgpack.encode(group)


def decode_group(data: bytes) -> Group:
    """Raises RolloutError where the bytes are no group, or one that contradicts itself."""
    try:
        return msgspec.msgpack.decode(data, type=Group)
    except msgspec.DecodeError as error:
        raise RolloutError(f"{len(data)} bytes are not a group of rollouts: {error}") from error


_FINISH_REASONS = ("stop", "length", "abort")


def _require_token_ids(what: str, token_ids: Sequence[int]) -> None:
    for position, token_id in enumerate(token_ids):
        if token_id < 0:
            raise RolloutError(f"{what} token {position} has id {token_id}; ids are vocabulary rows, 0 or more")


def _require_logprobs(logprobs: Sequence[float]) -> None:
    for position, logprob in enumerate(logprobs):
        if not (isfinite(logprob) and logprob <= 0.0):
            raise RolloutError(
                f"output token {position} has log-probability {logprob}; it is finite and at most 0: start the engine with "
                "`--logprobs-mode processed_logprobs` and sample without masks"
            )


def _require_cover(spans: Sequence[WeightSpan], num_tokens: int) -> None:
    """Raises RolloutError unless the spans cover [0, num_tokens) in order, without gaps, overlaps or empty ones."""
    expected = 0
    for span in spans:
        if span.start != expected or span.end <= span.start:
            raise RolloutError(
                f"the span of version {span.target_version} is [{span.start}, {span.end}) where one from {expected} on is due; "
                "spans cover the output in order, without gaps: keep all of the engine's `weight_versions`"
            )
        if span.target_version < 0:
            raise RolloutError(f"a span has version {span.target_version}; versions count from 0")
        expected = span.end
    if expected != num_tokens:
        raise RolloutError(
            f"weight spans cover {expected} of {num_tokens} output tokens; keep all of the engine's `weight_versions`"
        )
