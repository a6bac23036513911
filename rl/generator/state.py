"""Open groups as a checkpoint holds them: what was drawn so far, token by token, so that a run goes on from there.

They belong to the ledger's state of the same moment (`rl/staleness/ledger.py`): it says which groups run, this what they have.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from rl.generator.answer import Piece
from rl.trajectory import Trajectory, Turn, WeightSpan
from wire.errors import SchemaMismatch
from wire.spec import SCHEMA_VERSION


class PartialTurn(Struct, frozen=True, kw_only=True):
    """A turn as far as it has come."""

    prompt_token_ids: tuple[int, ...]
    """What it adds to the tokens before it; all tokens where it begins a fork."""
    is_fork: bool = False
    output_token_ids: tuple[int, ...] = ()
    behaviour_logprobs: tuple[float, ...] = ()
    weight_spans: tuple[WeightSpan, ...] = ()
    draft_version: int | None = None
    finish_reason: str = ""
    """Empty until it has ended."""

    def extended(self, piece: Piece) -> PartialTurn:
        """With more tokens; a span goes on where the next is of the same version."""
        offset, spans = len(self.output_token_ids), list(self.weight_spans)
        for span in piece.spans:
            moved = WeightSpan(target_version=span.target_version, start=span.start + offset, end=span.end + offset)
            if spans and spans[-1].target_version == moved.target_version:
                moved = replace(moved, start=spans.pop().start)
            spans.append(moved)
        return replace(
            self,
            output_token_ids=self.output_token_ids + piece.token_ids,
            behaviour_logprobs=self.behaviour_logprobs + piece.logprobs,
            weight_spans=tuple(spans),
            finish_reason=piece.finish_reason,
        )

    def finished(self, reason: str) -> PlayedTurn:
        turn = Turn(
            prompt_token_ids=self.prompt_token_ids,
            output_token_ids=self.output_token_ids,
            behaviour_logprobs=self.behaviour_logprobs,
            weight_spans=self.weight_spans,
            draft_version=self.draft_version,
            finish_reason=reason,
        )
        return PlayedTurn(turn=turn, is_fork=self.is_fork)


class PlayedTurn(Struct, frozen=True, kw_only=True):
    turn: Turn
    is_fork: bool
    """It begins a trajectory of its own; its prompt is the whole conversation."""


class OpenRollout(Struct, frozen=True, kw_only=True):
    """One rollout of an open group. Its environment begins again from the seed and takes the same answers again."""

    sample_index: int
    submitted_s: float
    attempt: int = 0
    """How often its environment failed before."""
    num_requests: int = 0
    """Sent for it so far; no two draw by the same random numbers."""
    turns: tuple[PlayedTurn, ...] = ()
    partial: PartialTurn | None = None
    """Of the turn that runs, tokens whose target is known."""
    finished: tuple[Trajectory, ...] = ()
    """What it became: one trajectory, and one more for each fork; sample indices are given when the group is complete."""


class OpenGroup(Struct, frozen=True, kw_only=True):
    """A running group of the ledger."""

    group_id: int
    temperature: float
    rollouts: tuple[OpenRollout, ...]


class GeneratorState(Struct, frozen=True, kw_only=True, tag="generator_state"):
    """generator -> the trainer's checkpoint."""

    schema_version: int = SCHEMA_VERSION
    groups: tuple[OpenGroup, ...] = ()

    def __post_init__(self) -> None:
        if self.schema_version != SCHEMA_VERSION:
            raise SchemaMismatch(
                f"open groups of schema {self.schema_version}, this process reads {SCHEMA_VERSION}; resume with the release that "
                "wrote them"
            )
