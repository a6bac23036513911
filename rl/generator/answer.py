"""What an engine says to one request for tokens, and whether it can be believed.

The events of vLLM 0.32's `/inference/v1/generate`: token ids and their log-probabilities piece by piece, the end's reason and the
tokens' target versions with the last piece, usage after it.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite

import msgspec
from msgspec import Struct

from rl.trajectory import WeightSpan

IMPOSSIBLE_LOGPROB = -9999.0
"""What vLLM writes for minus infinity, which no drawn token has."""
_REASONS = ("stop", "length", "abort")


class BadAnswer(Exception):
    """An answer that contradicts itself, the request or the trajectory's contract; none of it is used."""


class StreamFailed(Exception):
    """The stream itself says that it ends before its answer does."""


class _Logprob(Struct):
    logprob: float
    token_id: int | None = None


class _Logprobs(Struct):
    content: list[_Logprob] | None = None


class _Span(Struct):
    version: str
    start: int
    end: int


class _Choice(Struct):
    index: int = 0
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[_Span] | None = None


class _Error(Struct):
    message: str = ""


class _Event(Struct):
    choices: list[_Choice] | None = None
    error: _Error | None = None


class Piece(Struct, frozen=True, kw_only=True):
    """Tokens whose makers are known."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[WeightSpan, ...]
    finish_reason: str = ""
    """`stop` or `length`; empty where more is to come."""


_decoder = msgspec.json.Decoder(_Event)


class Answer:
    """One request's answer as it arrives.

    is_certain: asked with every event, with the version the stream began with; see `rl/generator/target_watch.py`.
    """

    def __init__(self, *, max_tokens: int, vocab_size: int, is_certain: Callable[[int | None], bool]) -> None:
        self._max_tokens = max_tokens
        self._vocab_size = vocab_size
        self._is_certain = is_certain
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._spans: tuple[WeightSpan, ...] = ()
        self._num_certain = 0
        self.begun_with: int | None = None
        """Version of the target the stream began with, as its head says."""
        self.draft_version: int | None = None
        self.finish_reason: str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    def take(self, data: bytes) -> None:
        """One event. Raises BadAnswer where it cannot be, StreamFailed where it tells of an error."""
        try:
            event = _decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadAnswer(f"an event is none: {error}") from error
        if event.error is not None:
            raise StreamFailed(event.error.message)
        for choice in event.choices or ():
            self._add(choice)

    def piece(self) -> Piece:
        """All tokens of a finished answer, those of known makers of any other."""
        if self.finish_reason is not None:
            reason = "" if self.finish_reason == "abort" else self.finish_reason
            tokens, logprobs = tuple(self._token_ids), tuple(self._logprobs)
            return Piece(token_ids=tokens, logprobs=logprobs, spans=self._spans, finish_reason=reason)
        count = self._num_certain
        spans: tuple[WeightSpan, ...] = ()
        if count:
            assert self.begun_with is not None
            spans = (WeightSpan(target_version=self.begun_with, start=0, end=count),)
        return Piece(token_ids=tuple(self._token_ids[:count]), logprobs=tuple(self._logprobs[:count]), spans=spans)

    def _add(self, choice: _Choice) -> None:
        token_ids = choice.token_ids or []
        logprobs = (choice.logprobs.content if choice.logprobs is not None else None) or []
        if choice.index != 0 or self.finish_reason is not None:
            raise BadAnswer("there are tokens of another answer, or after the end of this one")
        if len(token_ids) != len(logprobs):
            raise BadAnswer(f"a piece has {len(token_ids)} tokens and {len(logprobs)} log-probabilities")
        for token_id, entry in zip(token_ids, logprobs, strict=True):
            self._require_token(token_id, entry)
        self._token_ids += token_ids
        self._logprobs += [entry.logprob for entry in logprobs]
        if len(self._token_ids) > self._max_tokens:
            raise BadAnswer(f"{len(self._token_ids)} tokens came where {self._max_tokens} were asked for")
        if self.begun_with is not None and self._is_certain(self.begun_with):
            self._num_certain = len(self._token_ids)
        if choice.finish_reason is not None:
            self._finish(choice.finish_reason, choice.weight_versions or [])

    def _require_token(self, token_id: int, entry: _Logprob) -> None:
        if not 0 <= token_id < self._vocab_size:
            raise BadAnswer(f"token {token_id} is not in the vocabulary of {self._vocab_size}")
        if entry.token_id is not None and entry.token_id != token_id:
            raise BadAnswer(f"the log-probability beside token {token_id} is token {entry.token_id}'s")
        if not (isfinite(entry.logprob) and IMPOSSIBLE_LOGPROB < entry.logprob <= 0.0):
            raise BadAnswer(f"token {token_id} has log-probability {entry.logprob}")

    def _finish(self, reason: str, spans: list[_Span]) -> None:
        if reason not in _REASONS:
            raise StreamFailed(f"it ended with {reason!r}")
        if not self._token_ids and reason != "abort":
            raise BadAnswer(f"it ended with {reason!r} before its first token")
        expected = 0
        for span in spans:
            if not (span.version.isascii() and span.version.isdecimal()):
                raise BadAnswer(f"a span is of target {span.version!r}, which is no version")
            if span.start != expected or span.end <= span.start:
                raise BadAnswer(f"the span [{span.start}, {span.end}) comes where one from {expected} on is due")
            expected = span.end
        if expected != len(self._token_ids):
            raise BadAnswer(f"its spans cover {expected} of {len(self._token_ids)} tokens")
        self._spans = tuple(WeightSpan(target_version=int(span.version), start=span.start, end=span.end) for span in spans)
        self.finish_reason = reason
