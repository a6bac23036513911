"""EventRelay: passes server-sent events on byte for byte, whole events only.

Whole, because an engine that dies in the middle of an event would otherwise leave the client half a JSON document. It knows
how a stream ends well (`[DONE]`), and that an engine reports its own death as an error event, or its own stop as an answer
that was aborted, followed by `[DONE]`, which a client would take for success: that event is held apart, what follows it is
dropped.
"""

from __future__ import annotations

import msgspec

_END = b"\n\n"
_DONE = b"data: [DONE]"
_ERROR = b'data: {"error":'
ABORTED = b'"finish_reason":"abort"'
"""How vLLM ends answers that were not complete when it was told to stop. Within a text the quotes would be escaped."""
MAX_HELD_BYTES = 64 << 20
"""Of one unfinished event. The longest ones list a prompt's token ids: some 8 bytes a token, so 8 million tokens."""


DEATH = "EngineCore encountered an issue"
"""How the message of vLLM's EngineDeadError begins (v1/engine/exceptions.py), in whole answers and in error events."""


class _Detail(msgspec.Struct):
    message: str = ""
    code: int | str | None = None


class _Error(msgspec.Struct):
    error: _Detail


_error_decoder = msgspec.json.Decoder(_Error)


class EventRelay:
    """One stream. Feed it what arrives; send on what it returns."""

    def __init__(self) -> None:
        self.is_done = False
        """`[DONE]` has passed."""
        self.error = b""
        """The engine's own error event, where it has reported one; nothing passes after it."""
        self.is_aborted = False
        """The engine has given the answer up; nothing passes after that either."""
        self.is_too_long = False
        """An event exceeds what is held; neither it passes nor what follows."""
        self._held = bytearray()

    @property
    def has_failed(self) -> bool:
        return self.is_aborted or self.is_too_long or bool(self.error)

    def feed(self, data: bytes) -> bytes:
        """The whole events that can be sent now."""
        if self.has_failed:
            return b""
        held = self._held
        searched = max(len(held) - len(_END) + 1, 0)
        held += data
        cut = held.rfind(_END, searched) + len(_END)
        if cut < len(_END):
            cut = 0
        events = bytes(held[:cut])
        del held[:cut]
        self.is_too_long = len(held) > MAX_HELD_BYTES
        failure = _find_event(events, _ERROR)
        if failure >= 0:
            self.error = events[failure:].split(_END, 1)[0] + _END
            return events[:failure]
        aborted = events.find(ABORTED)
        if aborted >= 0:
            self.is_aborted = True
            return events[: events.rfind(_END, 0, aborted) + len(_END)] if _END in events[:aborted] else b""
        if _find_event(events, _DONE) >= 0:
            self.is_done = True
        return events

    def rest(self) -> bytes:
        """What is held of an unfinished event when the stream has ended well."""
        held, self._held = bytes(self._held), bytearray()
        return held


def is_engines_fault(error_event: bytes) -> bool:
    """Whether an engine's error event tells of a failure of its own, not of the request: another engine may do better."""
    detail = _read_error(error_event)
    return detail is None or not (isinstance(detail.code, int) and 400 <= detail.code < 500)


def reports_death(error: bytes) -> bool:
    """Whether an engine's error, whole answer or event, says that its core is gone.

    By the message's beginning: further in, an error may quote the client.
    """
    detail = _read_error(error)
    return detail is not None and detail.message.startswith(DEATH)


def _read_error(error: bytes) -> _Detail | None:
    try:
        return _error_decoder.decode(error.strip().removeprefix(b"data: ")).error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _find_event(events: bytes, start: bytes) -> int:
    """Where an event that begins with `start` begins, -1 where none does."""
    if events.startswith(start):
        return 0
    index = events.find(_END + start)
    return index if index < 0 else index + len(_END)
