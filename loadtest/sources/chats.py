"""Any file of JSON lines with OpenAI messages: `{"messages": [...]}`, a batch file's `{"body": {...}}`, or the bare list.

A prompt is everything up to the last question; the answer after it, if there is one, is left to the server.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec

from loadtest.lines import bounded_lines
from loadtest.traffic import Prompt, Source, TrafficError, by_opening, split

_TEXT_ROLES = ("system", "developer", "user", "assistant")


class _Text(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class _Message(msgspec.Struct):
    """A part of another kind than text, such as a picture, is none: such a chat cannot be sent again as text."""

    role: str
    content: str | list[_Text] | None = None

    def text(self) -> str | None:
        """None for what a chat of text goes on without: a call of a tool and its answer."""
        if self.role not in _TEXT_ROLES or self.content is None:
            return None
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class _Body(msgspec.Struct):
    messages: list[_Message]


class _Line(msgspec.Struct):
    messages: list[_Message] = []
    body: _Body | None = None


_DECODER = msgspec.json.Decoder(_Line | list[_Message])


def load(path: Path) -> Source:
    """The chats of a file; raises TrafficError where it cannot be read or holds none."""
    try:
        with path.open("rb") as file:
            source = split(_prompts(file, path.stem), about=by_opening)
    except OSError as error:
        raise TrafficError(f"cannot read {path}: {error}") from error
    if not source.train and not source.heldout:
        raise TrafficError(f"{path} holds no chat; each line is to be a JSON object with `messages`, the user's among them")
    return source


def _prompts(file: IO[bytes], name: str) -> Iterator[Prompt | None]:
    for line in bounded_lines(file):
        if line is None:
            yield None
        elif line.strip():
            yield _prompt(line, name)


def _prompt(line: bytes, name: str) -> Prompt | None:
    try:
        found = _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if isinstance(found, _Line):
        found = found.messages if found.body is None else found.body.messages
    messages = [{"role": message.role, "content": text} for message in found if (text := message.text()) is not None]
    while messages and messages[-1]["role"] != "user":
        messages.pop()
    if not messages or not messages[-1]["content"].strip():
        return None
    digest = hashlib.sha256(msgspec.json.encode(messages)).hexdigest()
    return Prompt(f"{name}/{digest[:16]}", tuple(messages))
