"""The domain of chats whose client names none: the system prompt they begin with, once it comes again.

One application mostly has one system prompt, so this tells applications apart where nobody sets `X-Paceline-Domain`. A prompt
that differs with every request (it holds the time, or the user's name) names nothing. This module does not know requests.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import msgspec
from msgspec import Raw, Struct

_MAX_NAMED = 16
"""System prompts that are domains; further ones stay in the default one, so that labels stay few."""
_NAMED_AT = 3
"""Request with a system prompt from which on it is a domain."""
_MAX_COUNTED = 1024
_ROLES = ("system", "developer")
_ROLES_AS_SENT = tuple(f'"{role}"'.encode() for role in _ROLES)


class _Message(Struct):
    role: str
    content: Raw


_list_decoder = msgspec.json.Decoder(list[Raw])
_message_decoder = msgspec.json.Decoder(_Message)


class SystemPrompts:
    """Counts system prompts by their digest, those of the latest requests."""

    def __init__(self) -> None:
        self._counts: OrderedDict[str, int] = OrderedDict()
        self._named: set[str] = set()

    def domain_of(self, messages: Raw | None) -> str | None:
        """The name for a chat's `messages`, as a client sent them; None without a system prompt that is known well enough."""
        content = _system_content(messages)
        if content is None:
            return None
        name = f"system-{hashlib.sha256(content).hexdigest()[:8]}"
        if name in self._named:
            return name
        self._counts[name] = self._counts.pop(name, 0) + 1
        if len(self._counts) > _MAX_COUNTED:
            self._counts.popitem(last=False)
        if self._counts[name] < _NAMED_AT or len(self._named) == _MAX_NAMED:
            return None
        self._named.add(name)
        del self._counts[name]
        return name


def _system_content(messages: Raw | None) -> bytes | None:
    """The first message's content as it was sent, where that is a system prompt. What is no chat is for the engine to refuse."""
    if messages is None or not any(role in bytes(messages) for role in _ROLES_AS_SENT):  # most of those without one, at once
        return None
    try:
        found = _list_decoder.decode(messages)
        first = _message_decoder.decode(found[0]) if found else None
    except (msgspec.DecodeError, RecursionError):
        return None
    return bytes(first.content) if first is not None and first.role in _ROLES else None
