"""Prompts, and which of a source are held out. A source is read tolerantly: what is broken is counted, not fatal.

The held-out split is by a hash of what a prompt is about, so it is the same in every run and on every machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from wire.errors import PacelineError

HELDOUT_SHARE = 0.2
MAX_TEXT_CHARACTERS = 64 << 20
"""Of one source: what comes after is not read, so that a file of any size opens soon and fits."""


MAX_PROMPTS = 1 << 20
"""The same for a file of very short ones, whose texts are the least of what they take."""


class TrafficError(PacelineError):
    """A source of prompts is not there or holds nothing usable."""

    code = "no_traffic"


@dataclass(frozen=True)
class Prompt:
    """One request to make."""

    id: str
    messages: tuple[dict[str, str], ...]
    later_questions: tuple[str, ...] = ()
    """What the user of the recorded conversation asked afterwards; only lanes with turns ask it."""

    @property
    def num_characters(self) -> int:
        return sum(len(message["content"]) for message in self.messages) + sum(map(len, self.later_questions))


@dataclass(frozen=True)
class Source:
    """All prompts of a source, split."""

    train: tuple[Prompt, ...]
    heldout: tuple[Prompt, ...]
    num_broken: int = 0
    """Records that hold no prompt, and stretches of a file that cannot be read."""

    @property
    def num_records(self) -> int:
        """Broken ones included."""
        return len(self.train) + len(self.heldout) + self.num_broken

    def part(self, split: str) -> Sequence[Prompt]:
        """`train` or `heldout`."""
        return self.heldout if split == "heldout" else self.train


def is_held_out(text: str, share: float = HELDOUT_SHARE) -> bool:
    """Whether the prompt that `text` stands for belongs to the held-out part."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def by_id(prompt: Prompt) -> str:
    """What decides on which side of the split a prompt lies, where no two prompts are about the same."""
    return prompt.id


def by_opening(prompt: Prompt) -> str:
    """The same for recorded chats: the user's first question, so that all parts and copies of a chat lie on one side."""
    return next((message["content"] for message in prompt.messages if message["role"] == "user"), "")


def split(
    candidates: Iterable[Prompt | None],
    *,
    about: Callable[[Prompt], str],
    max_characters: int = MAX_TEXT_CHARACTERS,
    max_prompts: int = MAX_PROMPTS,
) -> Source:
    """Read prompts, None for each that is broken, up to `max_characters` of text and `max_prompts` in number."""
    train: list[Prompt] = []
    heldout: list[Prompt] = []
    num_broken = num_characters = 0
    for prompt in candidates:
        if prompt is None or not _is_text(prompt):
            num_broken += 1
            continue
        num_characters += prompt.num_characters
        if num_characters > max_characters or len(train) + len(heldout) == max_prompts:
            break
        (heldout if is_held_out(about(prompt)) else train).append(prompt)
    return Source(tuple(train), tuple(heldout), num_broken)


def _is_text(prompt: Prompt) -> bool:
    """JSON can name halves of characters, which nobody can send."""
    try:
        for text in (prompt.id, *(message["content"] for message in prompt.messages), *prompt.later_questions):
            text.encode()
    except UnicodeEncodeError:
        return False
    return True
