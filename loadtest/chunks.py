"""What the client reads of a chat stream's chunks, and nothing else of them.

Typed, because decoding into structs is what keeps the client fast: a chunk costs it about a microsecond.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

DONE = b"[DONE]"

Count = Annotated[int, Meta(ge=0, le=1 << 40)]
"""Of tokens, as a server tells it; what is no such number makes its chunk a broken one."""
StepCount = Annotated[int, Meta(ge=0, le=1 << 10)]
"""Of the proposals of one verify step."""


class Delta(Struct):
    """What one chunk adds to the message. Reasoning and tool calls are tokens too."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None

    @property
    def has_tokens(self) -> bool:
        return bool(self.content or self.reasoning or self.reasoning_content or self.tool_calls)


class Choice(Struct):
    delta: Delta | None = None
    token_ids: list[int] | None = None
    """Of vLLM, where `return_token_ids` was asked for."""
    finish_reason: str | None = None


class PromptTokens(Struct):
    cached_tokens: Count | None = None


class Usage(Struct):
    """The server's own count."""

    completion_tokens: Count = 0
    prompt_tokens: Count | None = None
    prompt_tokens_details: PromptTokens | None = None

    @property
    def num_cached_tokens(self) -> int | None:
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None


class Speculation(Struct):
    """Of vLLM with `--per-request-spec-decode-metrics detailed`."""

    per_step_accepted: list[StepCount] | None = None
    per_step_drafted: list[StepCount] | None = None
    num_spec_tokens: StepCount | None = None


class RequestMetrics(Struct):
    speculative_decoding: Speculation | None = None


class Chunk(Struct):
    """One event of a stream."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None
    metrics: RequestMetrics | None = None

    @property
    def speculation(self) -> Speculation | None:
        return self.metrics.speculative_decoding if self.metrics else None


_DECODER = msgspec.json.Decoder(Chunk)


def decode(data: bytes) -> Chunk:
    """Raises msgspec.DecodeError where `data` is not a chunk, UnicodeDecodeError where it is not text."""
    return _DECODER.decode(data)
