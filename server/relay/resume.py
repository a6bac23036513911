"""Resumption: decides for each exchange whether its stream can go on elsewhere when its engine dies."""

from __future__ import annotations

from tokenizers import Tokenizer

from server.fleet import Fleet
from server.paths import CHAT_PATH, COMPLETIONS_PATH, GENERATE_PATH
from server.relay.exchange import Exchange
from server.relay.join import CannotResume
from server.relay.resumable import why_not_resumable
from server.relay.stream import PlainStream, ResumableStream, Stream


class Resumption:
    """Opens streams."""

    def __init__(self, fleet: Fleet, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        num_decoding = sum(engine.can_decode for engine in fleet.engines)
        self._reason = (
            "no other engine is configured"
            if num_decoding < 2
            else "the gateway has no tokenizer of the target"
            if self._tokenizer is None
            else ""
        )
        """Why no stream can; empty when some can."""

    def open(self, exchange: Exchange) -> Stream:
        """Streams that cannot go on pass byte for byte; only the others carry what going on takes."""
        fields = exchange.fields
        if exchange.path == GENERATE_PATH:
            return PlainStream(exchange, "whoever makes rollouts goes on with them")
        if (
            fields is None
            or exchange.path not in (CHAT_PATH, COMPLETIONS_PATH)
            or bytes(fields.get("stream", b"null")) != b"true"
        ):
            return PlainStream(exchange, "it is no stream")
        reason = self._reason or why_not_resumable(exchange.path, fields)
        return PlainStream(exchange, reason) if reason else ResumableStream(exchange, self._decode)

    def _decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        """Raises CannotResume where the engine's ids are none of the tokenizer's."""
        assert self._tokenizer is not None
        try:
            return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))
        except Exception as error:  # the tokenizers library raises nothing narrower
            raise CannotResume(f"the token ids cannot be decoded: {error}") from error
