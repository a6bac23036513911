"""Which requests can go on elsewhere after an engine's death, what their engines are asked, and what the next one is asked.

The next engine gets the prompt's and the emitted token ids through `/v1/completions`, so whatever depends on the ids emitted
before, or on how a chat's text is parsed, cannot be continued. A seed can be given but does not survive: the answer goes on
with the same distribution, though not with the same random numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Raw

from server.body import num_prompts
from server.paths import CHAT_PATH
from server.relay.exchange import Fields
from wire.control import AnswerLimits

DEFAULT_MAX_TOKENS = 16
"""Of `/v1/completions`, as OpenAI and vLLM have it; a chat's is its engine's to tell, else what the context leaves."""
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
"""Of each stop string. Where an answer is taken up, its end is compared with all their beginnings."""

_NEVER = (
    "bad_words",
    "best_of",
    "echo",
    "frequency_penalty",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "logprob_token_ids",
    "presence_penalty",
    "prompt_embeds",
    "prompt_logprobs",
    "repetition_detection",
    "structured_outputs",
    "suffix",
    "thinking_token_budget",
    "top_logprobs",
    "use_beam_search",
)
_CARRIED = (
    "allowed_token_ids",
    "cache_salt",
    "ignore_eos",
    "include_stop_str_in_output",
    "length_penalty",
    "logit_bias",
    "min_p",
    "model",
    "priority",
    "repetition_penalty",
    "seed",
    "session_id",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "stop",
    "stop_token_ids",
    "stream_interval",
    "temperature",
    "top_k",
    "top_p",
    "user",
    "vllm_xargs",
    "watermarking",
)
_MEDIA = (b'"image', b'"input_image', b'"audio', b'"input_audio', b'"video', b'"file')
_NULL = Raw(b"null")
_TRUE = Raw(b"true")
_WITH_USAGE = Raw(b'{"include_usage":true}')


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the client asked of its stream, which is not all that the gateway asks of the engine."""

    is_chat: bool
    token_ids: bool
    usage: bool
    continuous_usage: bool
    skip_special_tokens: bool
    stops: tuple[str, ...]


def why_not_resumable(path: str, fields: Fields) -> str:
    """Why a stream cannot go on elsewhere; empty when it can. Values that the engine will refuse may pass."""
    named = next((name for name in _NEVER if _value(fields, name)), None)
    if named is not None:
        return f"{named} is set"
    options = _value(fields, "stream_options") or {}
    if not isinstance(options, dict) or not isinstance(options.get("include_usage"), bool | None):
        return "stream_options are for the engine to refuse"
    # Bytes: to `/v1/completions` 0 is a wish, of the sampled tokens' own.
    if bytes(fields.get("logprobs", _NULL)) not in (b"null", b"false"):
        return "logprobs are asked for"
    if _value(fields, "n") not in (None, 1):
        return "it has several choices"
    if _value(fields, "tools") and _value(fields, "tool_choice") != "none":
        return "tools may be called"
    if (_value(fields, "response_format") or {"type": "text"}) != {"type": "text"}:
        return "response_format is set"
    if _value(fields, "include_stop_str_in_output") and _value(fields, "stop"):
        # Otherwise an engine holds back what could begin a stop string; here it has sent it.
        return "stop strings are part of the output"
    stops = _read_stops(fields)
    if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_CHARS for stop in stops):
        return "its stop strings are too many or too long"
    if path == CHAT_PATH:
        return "a message is not text" if any(word in bytes(fields.get("messages", _NULL)) for word in _MEDIA) else ""
    return "" if num_prompts(bytes(fields.get("prompt", _NULL))) == 1 else "it has several prompts"


def read_wishes(path: str, fields: Fields) -> Wishes:
    """Of a request that is resumable."""
    options = _value(fields, "stream_options")
    options = options if isinstance(options, dict) else {}
    return Wishes(
        is_chat=path == CHAT_PATH,
        token_ids=_value(fields, "return_token_ids") is True,
        usage=options.get("include_usage") is True,
        continuous_usage=options.get("include_usage") is True and options.get("continuous_usage_stats") is True,
        skip_special_tokens=_value(fields, "skip_special_tokens") is not False,
        stops=_read_stops(fields),
    )


def asking_for_ids(fields: Fields) -> Fields:
    """The client's request, and the token ids and usage on top."""
    options = _value(fields, "stream_options")
    asked = {**fields, "return_token_ids": _TRUE}
    if not isinstance(options, dict) or options.get("include_usage") is not True:
        # The other options say how usage is shown; without it they are void.
        asked["stream_options"] = _WITH_USAGE
    return asked


def max_tokens_left(
    fields: Fields, wishes: Wishes, limits: AnswerLimits, *, num_prompt: int, num_kept: int, max_model_len: int
) -> int:
    """How many tokens the rest of the answer may have; 0 or less when it is complete.

    The whole may have what one engine would have given it: vllm/entrypoints/serve/utils/api_utils.py:get_max_tokens.
    """
    asked = _value(fields, "max_tokens")
    if wishes.is_chat:
        asked = _value(fields, "max_completion_tokens") or asked
    if asked is None:
        asked = limits.default if wishes.is_chat else DEFAULT_MAX_TOKENS
    bounds = [bound for bound in (asked, limits.cap) if isinstance(bound, int)]
    return min([max_model_len - num_prompt, *bounds]) - num_kept


def continuation(fields: Fields, wishes: Wishes, ids: Sequence[int], *, num_kept: int, max_tokens: int) -> Fields:
    """What the next engine is asked: to go on after `ids`, of which the last `num_kept` were emitted."""
    encode = msgspec.json.encode
    rest = {name: fields[name] for name in _CARRIED if name in fields}
    min_tokens = _value(fields, "min_tokens")
    if isinstance(min_tokens, int) and min_tokens > num_kept:
        rest["min_tokens"] = Raw(encode(min_tokens - num_kept))
    options = {"include_usage": True, "continuous_usage_stats": wishes.continuous_usage}
    rest |= {
        "prompt": Raw(encode(ids)),
        "add_special_tokens": Raw(b"false"),
        "max_tokens": Raw(encode(max_tokens)),
        "stream": _TRUE,
        "stream_options": Raw(encode(options)),
        "return_token_ids": _TRUE,
    }
    return rest


def _read_stops(fields: Fields) -> tuple[str, ...]:
    """Empty, too, where the engine will refuse them."""
    stop = _value(fields, "stop")
    if isinstance(stop, str):
        return (stop,)
    return tuple(one for one in stop if isinstance(one, str)) if isinstance(stop, list) else ()


def _value(fields: Fields, name: str) -> Any:
    """Values here are small; those that no JSON parser reads are the engine's to refuse."""
    raw = fields.get(name)
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
