"""The capture channel and the event channel: what an engine tells about its steps.

Capture (engine -> learner, ZMQ PUSH/PULL): [CaptureStep as msgpack, one raw frame per tensor].
Events (engine -> anyone, ZMQ PUB/SUB): [topic, msgpack], topic `step` carries CaptureStep without tensors,
topic `stats` carries EngineStats once a second.
"""

from __future__ import annotations

from itertools import pairwise
from operator import gt
from typing import Annotated

from msgspec import DecodeError, Meta, Struct, msgpack

from wire.errors import SchemaMismatch, WireError
from wire.spec import SCHEMA_VERSION, CaptureSpec

TOPIC_STEP = b"step"
TOPIC_STATS = b"stats"

Count = Annotated[int, Meta(ge=0)]
"""Of anything; a negative one is refused where the message is read."""
Seconds = Annotated[float, Meta(ge=0.0, le=1e12)]


class TensorFrame(Struct, frozen=True):
    """Describes one raw frame: row-major, little-endian."""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


class CaptureSpan(Struct, frozen=True, kw_only=True):
    """The rows of one request in one engine step: a prompt chunk, or one verify step.

    A verify step has rows [last emitted token, proposal 1 .. proposal K]. Row i holds the hidden state from which the
    target predicts the token at `first_position + i + 1`. Rows 0..num_accepted lie on the emitted text; later rows are
    conditioned on a rejected token.
    """

    request_id: str
    """The engine's own, distinct within its epoch: it holds the client's, which clients may repeat."""
    tenant: str
    domain: str
    temperature: float
    first_position: int
    """Position of the first row's token in the request, prompt included."""
    token_ids: list[int]
    """Input tokens, one a row."""
    num_proposed: int
    """How many of the last rows are proposals of the draft; 0 in a prompt chunk."""
    num_accepted: int
    """How many of them verification accepted; a prefix."""
    emitted_ids: list[int]
    """Accepted tokens and the target's own next one; empty while a prompt is still being prefilled."""
    draft_version: int
    """Of the draft that made the proposals (it may be older than the active one right after a commit)."""
    prompt_key: str = ""
    """The same for every request with the same prompt, whatever a prefix cache left out; empty where the engine says none."""

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    @property
    def num_valid_rows(self) -> int:
        """Rows that lie on the emitted text."""
        return self.num_rows - self.num_proposed + self.num_accepted


class CaptureStep(Struct, frozen=True, kw_only=True, tag="capture_step"):
    """engine -> learner: the sampled requests of one engine step.

    Tensors, rows concatenated in span order: aux [rows, num_aux * hidden_size], hidden [rows, hidden_size] (after the
    final norm), both of `spec.dtype`. Absent on the event channel.
    """

    schema_version: int
    spec: CaptureSpec
    engine_id: str
    engine_epoch: str
    """Changes when the engine restarts."""
    step: int
    target_version: int
    captured_at_s: float
    """Unix time."""
    spans: list[CaptureSpan]
    finished_ids: list[str]
    """Requests that ended since the last message, however they ended."""
    tensors: list[TensorFrame]


class AcceptanceCount(Struct, frozen=True, kw_only=True):
    """Cumulative acceptance of one draft version on one tenant and domain, every request counted, sampled or not.

    Raises ValueError where the counts contradict each other: rates above 1 would be made of them.
    """

    draft_version: Count
    tenant: str
    domain: str
    num_verify_steps: Count
    """Verify steps with at least one proposal."""
    proposed_per_position: list[Count]
    accepted_per_position: list[Count]

    def __post_init__(self) -> None:
        steps, proposed, accepted = self.num_verify_steps, self.proposed_per_position, self.accepted_per_position
        is_prefix = all(deeper <= count for count, deeper in [*pairwise([steps, *proposed]), *pairwise(accepted)])
        if not is_prefix or len(accepted) > len(proposed) or any(map(gt, accepted, proposed)):
            raise ValueError(
                f"impossible counts after {steps} verify steps: no position has more than the one before, and none more accepted "
                "than proposed"
            )

    @property
    def acceptance_length(self) -> float:
        """AL: tokens emitted per verify step; 1.0 when nothing is accepted or nothing was measured."""
        return 1.0 + sum(self.accepted_per_position) / self.num_verify_steps if self.num_verify_steps else 1.0


class StepTime(Struct, frozen=True, kw_only=True):
    """Cumulative time of decode steps of one kind: no prompt in them, K proposals verified and K made for each request.

    Only steps between two of their own kind are timed, from their begin to the next one's: what they cost in all, wherever
    the device and the host overlap, and never an idle time.
    """

    bucket: Count
    """Of the number of requests, see `wire.depth.bucket_of`."""
    depth: Count
    """K."""
    num_steps: Count
    total_s: Seconds


class EngineStats(Struct, frozen=True, kw_only=True, tag="engine_stats"):
    """engine -> gateway and anyone, once a second: cumulative counters since the engine's start."""

    schema_version: int
    engine_id: str
    engine_epoch: str
    sent_at_s: float
    draft_version: Count
    target_version: Count
    capture_rate: float
    acceptance: list[AcceptanceCount]
    num_captured_rows: Count
    num_dropped_rows: dict[str, Count]
    """By reason: `queue_full`, `channel_full`, `no_learner`, `send_failed`."""
    step_times: list[StepTime] = []


Event = CaptureStep | EngineStats

_encoder = msgpack.Encoder()
_decoder = msgpack.Decoder(Event)


def encode(message: Event) -> bytes:
    """One message as msgpack."""
    return _encoder.encode(message)


def decode(payload: bytes | memoryview) -> Event:
    """Decode one message; raises WireError where it is garbage, SchemaMismatch where it is of another schema."""
    try:
        message = _decoder.decode(payload)
    except (DecodeError, RecursionError) as error:
        raise WireError(f"undecodable message of {len(payload)} bytes: {error}") from error
    if message.schema_version != SCHEMA_VERSION:
        raise SchemaMismatch(
            f"{message.engine_id} speaks schema {message.schema_version}, this process {SCHEMA_VERSION}; run the same release everywhere"
        )
    return message
