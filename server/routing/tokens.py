"""Prompts as the engine will see them: rendered and tokenized in the gateway, all but short ones off its event loop.

Nothing depends on the result but the choice of an engine: where this gateway cannot know the tokens it says so, and
where it were wrong a request would only land on an engine that holds less of it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Raw
from tokenizers import Tokenizer

from server.paths import CHAT_PATH, COMPLETIONS_PATH, GENERATE_PATH
from server.routing.conversation import NotText, read_conversation
from server.routing.fast_bpe import FastBpe
from wire.chat_template import ChatTemplate, TemplateRefusal, read_special_tokens

MAX_THREADS = 2
MAX_WAIT_S = 0.25
"""For a prompt's tokens, the wait for a thread included. Nobody's first byte waits longer for somebody else's prompt."""
MAX_BYTES_ON_LOOP = 2048
"""Of a body whose prompt is read on the event loop: that takes it well under a millisecond, two at worst, and the way to a
thread and back would take longer wherever the machine is busy."""
MAX_BYTES_PER_TOKEN = 16
"""Hardly any text has more; a body of more than that for each token of a context window is a prompt engines refuse."""
_MAX_TOKEN_ID = 2**31 - 1
_SESSION_CHARS = 256
_SESSION_TOKENS = 64
"""A completion's session is named by its beginning: a conversation's later prompts begin with its first."""

_CONTENT_FIELDS = {CHAT_PATH: "messages", COMPLETIONS_PATH: "prompt", GENERATE_PATH: "token_ids"}
_REASONS_TO_LEAVE_IT = {
    "tools": "tools",
    "functions": "tools",
    "documents": "unsupported_field",
    "chat_template": "unsupported_field",
    "truncate_prompt_tokens": "unsupported_field",
    "prompt_embeds": "not_text",
    "prompt_logprobs": "cache_not_read",
}
"""Fields that change the tokens in ways only the engine knows, or keep it from reading its cache."""
_ARGUMENTS_OF_THE_CALL = frozenset(
    [
        "conversation",
        "messages",
        "tools",
        "documents",
        "chat_template",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    ]
)
"""Names an engine would not hand to the template as variables."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What routing knows of one request."""

    token_ids: tuple[int, ...] | None = None
    """None where this gateway cannot know them; `reason` says why, in one word."""
    salt: str | None = None
    """KV of different salts is never shared."""
    session: str | None = None
    """Equal for requests of one conversation."""
    reason: str = ""


class _Unknown(Exception):
    """The tokens cannot be known here; its text is the reason, one word."""


class Prompts:
    """Reads prompts out of request bodies."""

    def __init__(self, target_dir: Path | None, max_model_len: Callable[[], int]) -> None:
        """`target_dir` holds `tokenizer.json` and the chat template; None or without them: no tokens are known.

        `max_model_len` tells how many tokens any engine takes at most, 0 while none has said so.
        """
        self.tokenizer = _load_tokenizer(target_dir)
        """The target's, shared with whoever else turns text into its tokens; None where it is not on disk."""
        self._fast = FastBpe.of(self.tokenizer) if self.tokenizer is not None else None
        self._template = ChatTemplate.load(target_dir) if target_dir is not None else None
        self._max_model_len = max_model_len
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="prompts")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def read(self, path: str, fields: Mapping[str, Raw], session: str | None = None) -> Prompt:
        """`session` is what the client says its session is. Never fails on what a client sent."""
        num_bytes, max_bytes = sum(map(len, fields.values())), self._max_model_len() * MAX_BYTES_PER_TOKEN
        if max_bytes and num_bytes > max_bytes:
            return Prompt(session=session, reason="too_long")
        if num_bytes <= MAX_BYTES_ON_LOOP:
            return self._read(path, fields, session)
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                return await asyncio.get_running_loop().run_in_executor(self._threads, self._read, path, fields, session)
        except TimeoutError:
            return Prompt(session=session, reason="slow")

    def _read(self, path: str, fields: Mapping[str, Raw], session: str | None) -> Prompt:
        try:
            salt = _value(fields, "cache_salt")
            content = _value(fields, _CONTENT_FIELDS.get(path, "prompt"))
        except _Unknown as unknown:
            return Prompt(session=session, reason=str(unknown))
        salt = salt if isinstance(salt, str) and salt else None
        try:
            session = session or _session_of(content)
            return Prompt(tuple(self._tokens(path, fields, content)), salt, session)
        except _Unknown as unknown:
            return Prompt(None, salt, session, str(unknown))
        except RecursionError:
            # Decoding bears deeper nesting than copying, encoding and templates do.
            return Prompt(None, salt, session, "unreadable")

    def _tokens(self, path: str, fields: Mapping[str, Raw], content: Any) -> list[int]:
        for name, reason in _REASONS_TO_LEAVE_IT.items():
            value = _value(fields, name)
            if value is not None and value is not False and value != [] and value != "":
                raise _Unknown(reason)
        if path == CHAT_PATH:
            return self._encode(self._chat_text(fields, content), special=_flag(fields, "add_special_tokens", False))
        if path == GENERATE_PATH:
            return _token_ids(content)
        if path != COMPLETIONS_PATH:
            raise _Unknown("other_route")
        if isinstance(content, list) and len(content) == 1 and isinstance(content[0], str | list):
            content = content[0]
        if isinstance(content, str):
            return self._encode(content, special=_flag(fields, "add_special_tokens", True))
        return _token_ids(content)

    def _chat_text(self, fields: Mapping[str, Raw], messages: Any) -> str:
        if self._template is None:
            raise _Unknown("no_template")
        if not isinstance(messages, list) or not messages:
            raise _Unknown("unreadable")
        try:
            return self._template.render(
                read_conversation(messages, self._template),
                add_generation_prompt=_flag(fields, "add_generation_prompt", True),
                continue_final_message=_flag(fields, "continue_final_message", False),
                **self._template_variables(fields),
            )
        except NotText:
            raise _Unknown("not_text") from None
        except TemplateRefusal:
            raise _Unknown("template_refused") from None

    def _template_variables(self, fields: Mapping[str, Raw]) -> dict[str, Any]:
        assert self._template is not None
        variables = _value(fields, "chat_template_kwargs") or {}
        if not isinstance(variables, dict) or _ARGUMENTS_OF_THE_CALL & variables.keys():
            raise _Unknown("unsupported_field")
        effort = _value(fields, "reasoning_effort")
        if effort is not None:
            variables = {"enable_thinking": effort != "none"} | variables | {"reasoning_effort": effort}
        given = ("add_generation_prompt", "continue_final_message")
        return {name: value for name, value in variables.items() if name in self._template.variables and name not in given}

    def _encode(self, text: str, *, special: bool) -> list[int]:
        if self.tokenizer is None:
            raise _Unknown("no_tokenizer")
        is_plain = not special or self.tokenizer.num_special_tokens_to_add(is_pair=False) == 0
        try:
            ids = self._fast.encode(text) if self._fast is not None and is_plain else None
            if ids is not None:
                return ids
            # Of the tokenizer's ways to encode, only those for batches let other threads run meanwhile.
            return self.tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids
        except UnicodeError:
            raise _Unknown("unreadable") from None


def _load_tokenizer(target_dir: Path | None) -> Tokenizer | None:
    """A file that is there but cannot be read is an error at start, not a gateway that silently routes by load."""
    if target_dir is None or not (target_dir / "tokenizer.json").is_file():
        return None
    # Prompts come one at a time: the library would hand even a batch of one to threads of its own, and wait for them.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = Tokenizer.from_file(str(target_dir / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.add_special_tokens(
        [token for token in read_special_tokens(target_dir).values() if tokenizer.token_to_id(token) is not None]
    )
    return tokenizer


def _value(fields: Mapping[str, Raw], name: str) -> Any:
    """A field's value, None where it is absent."""
    raw = fields.get(name)
    try:
        return None if raw is None else msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        raise _Unknown("unreadable") from None


def _flag(fields: Mapping[str, Raw], name: str, default: bool) -> bool:
    value = _value(fields, name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise _Unknown("unsupported_field")
    return value


def _token_ids(content: Any) -> list[int]:
    if not isinstance(content, list) or not content:
        raise _Unknown("unreadable")
    if any(isinstance(item, str | list) for item in content):
        raise _Unknown("several_prompts")
    if not all(type(item) is int and 0 <= item <= _MAX_TOKEN_ID for item in content):
        raise _Unknown("unreadable")
    return content


def _session_of(content: Any) -> str | None:
    """A name for the conversation: of a chat its messages up to the first user's, of a completion its beginning."""
    if isinstance(content, str):
        beginning: Any = content[:_SESSION_CHARS]
    elif isinstance(content, list) and content and isinstance(content[0], dict):
        ends = (place for place, message in enumerate(content) if isinstance(message, dict) and message.get("role") == "user")
        beginning = content[: next(ends, 0) + 1]
    elif isinstance(content, list) and content:
        beginning = content[:_SESSION_TOKENS]
    else:
        return None
    return blake2b(msgspec.json.encode(beginning), digest_size=16).hexdigest()
