"""What the mock engine says: the alphabet, a letter a token, round and round, in the shapes of vLLM's completion routes.

After a prompt that ends in a letter's token it goes on from there. So an answer that continues on another engine can be told
from one that lost a token or began anew.
"""

from __future__ import annotations

import json
import string
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

MODEL = "mock"
LETTERS = string.ascii_lowercase
NUM_CHAT_PROMPT_TOKENS = 8
"""A chat's messages are not read; they count as that many tokens."""
DEFAULT_MAX_TOKENS = 16


class Alphabet:
    """The vocabulary: one token id per letter."""

    def __init__(self, target_dir: Path | None = None) -> None:
        """With the ids of a target's `tokenizer.json`, where a gateway decodes them; else 1000 and on."""
        vocabulary = json.loads((target_dir / "tokenizer.json").read_text())["model"]["vocab"] if target_dir else {}
        self.ids = [int(vocabulary.get(letter, 1000 + index)) for index, letter in enumerate(LETTERS)]

    def after(self, ids: Sequence[Any]) -> int:
        """Index of the letter that follows these token ids."""
        last = ids[-1] if ids else None
        return (self.ids.index(last) + 1) % len(LETTERS) if last in self.ids else 0


def is_recital(text: str, num_tokens: int) -> bool:
    """Whether a text is what the mock says in that many tokens after a prompt: nothing lost, doubled or begun anew."""
    return len(text) == num_tokens and text == (LETTERS * (num_tokens // len(LETTERS) + 1))[:num_tokens]


class Answer:
    """One answer, in the shapes of vLLM's two completion routes."""

    def __init__(self, fields: Mapping[str, Any], alphabet: Alphabet, *, is_chat: bool) -> None:
        self.num_tokens = int(fields.get("max_completion_tokens") or fields.get("max_tokens") or DEFAULT_MAX_TOKENS)
        prompt = fields.get("prompt")
        options = fields.get("stream_options") or {}
        # Continuing is asked for in token ids. A prompt in words ends in no letter of ours.
        self._prompt_ids = list(prompt) if isinstance(prompt, list) else [alphabet.ids[-1]] * NUM_CHAT_PROMPT_TOKENS
        self._first = alphabet.after(self._prompt_ids)
        self._alphabet = alphabet
        self._is_chat = is_chat
        self._has_ids = bool(fields.get("return_token_ids"))
        self._has_usage = bool(options.get("include_usage"))
        self._has_running_usage = self._has_usage and bool(options.get("continuous_usage_stats"))
        self._kind = "chat.completion" if is_chat else "text_completion"
        name = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._head = {"id": name, "created": int(time.time()), "model": MODEL}

    def opening(self) -> bytes:
        """The chunk with the role, which only a chat has; it comes with the first token."""
        if not self._is_chat:
            return b""
        more = {"prompt_token_ids": self._prompt_ids} if self._has_ids else {}
        return self._event([self._choice({"role": "assistant", "content": ""}, None)], 0, more)

    def chunk(self, index: int) -> bytes:
        """The chunk of one token."""
        letter = (self._first + index) % len(LETTERS)
        finish = "length" if index + 1 == self.num_tokens else None
        choice = self._choice({"content": LETTERS[letter]} if self._is_chat else LETTERS[letter], finish)
        if self._has_ids:
            choice["token_ids"] = [self._alphabet.ids[letter]]
            if index == 0 and not self._is_chat:
                choice["prompt_token_ids"] = self._prompt_ids
        return self._event([choice], index + 1)

    def ending(self) -> bytes:
        """What follows the last token."""
        usage = self._event([], self.num_tokens, {"usage": self._usage(self.num_tokens)}) if self._has_usage else b""
        return usage + b"data: [DONE]\n\n"

    def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        letters = [(self._first + index) % len(LETTERS) for index in range(self.num_tokens)]
        text = "".join(LETTERS[letter] for letter in letters)
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        choice |= {"message": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
        if self._has_ids:
            choice["token_ids"] = [self._alphabet.ids[letter] for letter in letters]
        return {**self._head, "object": self._kind, "choices": [choice], "usage": self._usage(self.num_tokens)}

    def _choice(self, content: Any, finish: str | None) -> dict[str, Any]:
        return {"index": 0, "delta" if self._is_chat else "text": content, "logprobs": None, "finish_reason": finish}

    def _usage(self, num_tokens: int) -> dict[str, int]:
        num_prompt = len(self._prompt_ids)
        return {"prompt_tokens": num_prompt, "completion_tokens": num_tokens, "total_tokens": num_prompt + num_tokens}

    def _event(self, choices: list[dict[str, Any]], num_tokens: int, more: Mapping[str, Any] | None = None) -> bytes:
        kind = f"{self._kind}.chunk" if self._is_chat else self._kind
        running = {"usage": self._usage(num_tokens)} if self._has_running_usage else {}
        return (
            b"data: "
            + msgspec.json.encode({**self._head, "object": kind, "choices": choices, **running, **(more or {})})
            + b"\n\n"
        )
