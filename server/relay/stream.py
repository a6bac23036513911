"""Streams: what becomes of an engine's events on their way to the client.

A PlainStream passes them on byte for byte. A ResumableStream asks the engine for token ids too, takes out what the client did
not ask for, and remembers enough to go on with another engine: the client sees one answer with one id, one role and one count
of tokens, whichever engines it came from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec
from msgspec import Raw

from server.paths import COMPLETIONS_PATH
from server.relay.exchange import Exchange, Fields, Leg
from server.relay.join import CannotResume, Join, find_join
from server.relay.resumable import asking_for_ids, continuation, max_tokens_left, read_wishes
from wire.control import AnswerLimits

_END = b"\n\n"
_CHUNK = b"data: {"
_PREFIX = b"data: "
_DONE = b"data: [DONE]\n\n"
_NULL = Raw(b"null")

_encode = msgspec.json.encode
_chunk_decoder = msgspec.json.Decoder(dict[str, Raw])
_choices_decoder = msgspec.json.Decoder(list[dict[str, Raw]])
_ids_decoder = msgspec.json.Decoder(list[int] | None)
_text_decoder = msgspec.json.Decoder(str | None)


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _PromptDetails | None = None


class _WithUsage(msgspec.Struct):
    usage: _Usage | None = None


_usage_decoder = msgspec.json.Decoder(_WithUsage)


def read_cached_tokens(answer: bytes) -> int | None:
    """Prompt tokens an engine found in its cache, as its answer's usage tells; None where it does not."""
    try:
        usage = _usage_decoder.decode(answer).usage
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    details = usage.prompt_tokens_details if usage is not None else None
    return details.cached_tokens if details is not None else None


class Stream(Protocol):
    """One answer in the making."""

    num_cached_tokens: int | None
    """Of the prompt, as the engine told at the end."""

    @property
    def leg(self) -> Leg:
        """What the engine is asked now."""
        ...

    def take(self, events: bytes) -> bytes:
        """What the client gets of an engine's whole events; raises CannotResume where they do not go on as they must."""
        ...

    def restart(self) -> None:
        """Forget what was taken; the client has none of it."""
        ...

    def closing(self) -> bytes:
        """The events that end an answer whose text is complete; empty where it is not."""
        ...

    def go_on(self, *, max_model_len: int, limits: AnswerLimits, target_version: int | None) -> None:
        """Turn to the next engine; raises CannotResume."""
        ...


class PlainStream:
    """Passes on what comes."""

    def __init__(self, exchange: Exchange, reason: str) -> None:
        self.leg = Leg(exchange.path, exchange.fields)
        self.num_cached_tokens: int | None = None
        self._reason = reason
        """Why it cannot go on elsewhere."""

    def take(self, events: bytes) -> bytes:
        return events

    def restart(self) -> None:
        """There is nothing to forget."""

    def closing(self) -> bytes:
        return b""

    def go_on(self, *, max_model_len: int, limits: AnswerLimits, target_version: int | None) -> None:
        raise CannotResume(self._reason)


class ResumableStream:
    """Remembers ids and text."""

    def __init__(self, exchange: Exchange, decode: Callable[[list[int], bool], str]) -> None:
        assert exchange.fields is not None
        self._asked: Fields = exchange.fields
        self._wishes = read_wishes(exchange.path, exchange.fields)
        self._decode = decode
        self.leg = Leg(exchange.path, asking_for_ids(exchange.fields))
        self.restart()

    def restart(self) -> None:
        self.num_cached_tokens: int | None = None
        self._prompt_ids: list[int] = []
        self._ids: list[int] = []
        self._sent: list[str] = []
        self._held = b""
        """The role, until there is text: until then an engine's death costs the client nothing."""
        self._head: Fields = {}
        """`id`, `object`, `created` and `model` of all chunks."""
        self._is_finished = False
        self._problem = ""
        self._join: Join | None = None
        """Where this engine's answer meets the one before; None for the first."""
        self._overlap_seen = ""

    def take(self, events: bytes) -> bytes:
        make = self._passed if self._join is None else self._translated
        out = b"".join(event for event in map(make, events.split(_END)) if event)
        if self._held and (self._ids or self._is_finished):
            out, self._held = self._held + out, b""
        return out

    def closing(self) -> bytes:
        if not self._is_finished:
            return b""
        usage = self._chunk([], usage=self._usage()) if self._wishes.usage else b""
        return usage + _DONE

    def go_on(self, *, max_model_len: int, limits: AnswerLimits, target_version: int | None) -> None:
        if self._problem or not self._prompt_ids:
            raise CannotResume(self._problem or "the engine told no prompt ids")
        wishes = self._wishes
        join = find_join(
            lambda ids: self._decode(list(ids), wishes.skip_special_tokens),
            self._prompt_ids,
            self._ids,
            "".join(self._sent),
            wishes.stops,
        )
        if wishes.token_ids and join.num_kept < len(self._ids):
            raise CannotResume("the client has token ids that would be generated anew")
        num_prompt, num_kept = len(self._prompt_ids), join.num_kept
        left = max_tokens_left(
            self._asked, wishes, limits, num_prompt=num_prompt, num_kept=num_kept, max_model_len=max_model_len
        )
        if left <= 0:
            raise CannotResume("no token is left")
        del self._ids[num_kept:]
        ids = [*self._prompt_ids, *self._ids]
        fields = continuation(self._asked, wishes, ids, num_kept=num_kept, max_tokens=left)
        self.leg = Leg(COMPLETIONS_PATH, fields, token_ids=tuple(ids), target_version=target_version)
        self._join, self._overlap_seen = join, ""

    def _passed(self, event: bytes) -> bytes:
        """The first engine's event, without what only the gateway asked for."""
        if not event.startswith(_CHUNK):
            return event + _END if event else b""
        try:
            return self._stripped(event)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self._problem = "the engine's events are of an unknown kind"
            return event + _END

    def _stripped(self, event: bytes) -> bytes:
        chunk = _chunk_decoder.decode(event[len(_PREFIX) :])
        choices = _choices_decoder.decode(chunk.get("choices", b"[]"))
        if not choices:
            self.num_cached_tokens = read_cached_tokens(event[len(_PREFIX) :])
            return event + _END if self._wishes.usage else b""
        choice = choices[0]
        prompt_holder = chunk if self._wishes.is_chat else choice
        if not self._prompt_ids:
            self._prompt_ids = _ids_decoder.decode(prompt_holder.get("prompt_token_ids", _NULL)) or []
            self._head = {name: chunk[name].copy() for name in ("id", "object", "created", "model") if name in chunk}
        is_empty = self._note(choice)
        if not self._wishes.token_ids:
            for holder in (chunk, choice):
                # Null, not absent: so an engine writes it that was not asked.
                holder.update((name, _NULL) for name in ("prompt_token_ids", "token_ids") if name in holder)
            if is_empty:
                return b""
        chunk["choices"] = Raw(_encode(choices))
        written = _PREFIX + _encode(chunk) + _END
        if self._wishes.is_chat and not self._ids and not self._is_finished:
            self._held += written
            return b""
        return written

    def _note(self, choice: dict[str, Raw]) -> bool:
        """Remember a chunk's ids and text; True where it has neither text nor end."""
        ids = _ids_decoder.decode(choice.get("token_ids", _NULL)) or []
        self._ids += ids
        is_end = choice.get("finish_reason", _NULL) != _NULL
        self._is_finished |= is_end
        if self._wishes.is_chat:
            delta = _chunk_decoder.decode(choice.get("delta", b"{}"))
            text = _text_decoder.decode(delta.get("content", _NULL)) or ""
            if any(name not in ("role", "content") and value != _NULL for name, value in delta.items()):
                self._problem = "the answer has more than text"
            elif not delta and not is_end:
                self._problem = "the engine holds back what is no text"
            is_empty = not delta and not is_end
        else:
            text = _text_decoder.decode(choice.get("text", _NULL)) or ""
            is_empty = False
        if text and not ids and not self._ids:
            self._problem = "the engine told no token ids"
        self._sent.append(text)
        return is_empty

    def _translated(self, event: bytes) -> bytes:
        """A later engine's event, as a chunk of the first one's answer."""
        if not event.startswith(_CHUNK):
            return event + _END if event else b""
        try:
            return self._rewritten(event)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise CannotResume("the next engine's events are of an unknown kind") from None

    def _rewritten(self, event: bytes) -> bytes:
        choices = _choices_decoder.decode(_chunk_decoder.decode(event[len(_PREFIX) :]).get("choices", b"[]"))
        if not choices:
            self.num_cached_tokens = read_cached_tokens(event[len(_PREFIX) :])
            return self._chunk([], usage=self._usage()) if self._wishes.usage else b""
        choice = choices[0]
        ids = _ids_decoder.decode(choice.get("token_ids", _NULL)) or []
        self._ids += ids
        is_end = choice.get("finish_reason", _NULL) != _NULL
        self._is_finished |= is_end
        text = self._fresh(_text_decoder.decode(choice.get("text", _NULL)) or "", is_end=is_end)
        if not text and not is_end and not self._wishes.token_ids:
            return b""
        self._sent.append(text)
        usage = self._usage() if self._wishes.continuous_usage else None
        return self._chunk([self._choice(choice, text, ids, is_end=is_end)], usage=usage)

    def _fresh(self, text: str, *, is_end: bool) -> str:
        """The part of a later engine's text that the client does not have; raises CannotResume where it is another text."""
        assert self._join is not None
        overlap = self._join.overlap
        if len(self._overlap_seen) < len(overlap):
            seen = self._overlap_seen + text
            is_same = seen.startswith(overlap) if len(seen) >= len(overlap) else overlap.startswith(seen) and not is_end
            if not is_same:
                raise CannotResume("the next engine's text does not go on from what was sent")
            self._overlap_seen, text = seen[: len(overlap)], seen[len(overlap) :]
        ahead = self._join.ahead
        if ahead:
            self._join = Join(self._join.num_kept, "", overlap)
        return ahead + text

    def _choice(self, theirs: dict[str, Raw], text: str, ids: list[int], *, is_end: bool) -> dict[str, Any]:
        token_ids = ids if self._wishes.token_ids else None
        finish = {"logprobs": None, "finish_reason": theirs.get("finish_reason", _NULL)}
        stop = {"stop_reason": theirs.get("stop_reason", _NULL)}
        if self._wishes.is_chat:
            return {"index": 0, "delta": {"content": text}, **finish, **(stop if is_end else {}), "token_ids": token_ids}
        return {"index": 0, "text": text, **finish, **stop, "prompt_token_ids": None, "token_ids": token_ids}

    def _usage(self) -> dict[str, int]:
        num_prompt, num_emitted = len(self._prompt_ids), len(self._ids)
        return {"prompt_tokens": num_prompt, "total_tokens": num_prompt + num_emitted, "completion_tokens": num_emitted}

    def _chunk(self, choices: list[dict[str, Any]], *, usage: dict[str, int] | None) -> bytes:
        chunk: dict[str, Any] = {**self._head, "choices": choices}
        if usage is not None:
            chunk["usage"] = usage
        return _PREFIX + _encode(chunk) + _END
