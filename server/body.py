"""Request bodies: read with a bound, parsed one level deep, and given our arguments for the engine's worker.

Only the top level is parsed, so every value a client sent reaches the engine byte for byte. What the values mean is the
engine's business, except where one could hurt other requests.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Annotated

import msgspec
from msgspec import Meta, Raw
from starlette.types import Receive

from server.domains import SystemPrompts
from server.errors import ApiError, nested_too_deeply
from server.identity import DEFAULT_LABEL, Identity

_OUR_PREFIX = "paceline_"
_INTERNAL_FIELDS = ("kv_transfer_params", "ec_transfer_params")
"""They name hosts and ports an engine would connect to; a client must not choose those."""

_INTERNAL_XARGS = (*_INTERNAL_FIELDS, "kv_cache_report_mode")
"""vLLM takes these out of the extra arguments as if they were fields of its own; a wrong type there ends the engine."""

_PRIORITY = "priority"
_GUIDED = "structured_outputs"
"""vLLM takes any value of it for an object, and fails instead of refusing."""

USERS_PRIORITY = 0
"""Of who names none. Smaller numbers go first, so a user with one would go before all others."""

_object_decoder = msgspec.json.Decoder(dict[str, Raw])
_xargs_decoder = msgspec.json.Decoder(dict[str, Raw] | None)
_count_decoder = msgspec.json.Decoder(int | None)
_priority_decoder = msgspec.json.Decoder(Annotated[int, Meta(ge=USERS_PRIORITY)] | None)
_list_decoder = msgspec.json.Decoder(list[Raw])
_NUMBER_STARTS = tuple(b"%c" % char for char in b"-0123456789")
_PROMPT_FIELDS = ("prompt", "prompt_embeds")


class ClientDisconnected(Exception):
    """The client is gone; there is nobody to answer."""


async def read_body(receive: Receive, headers: list[tuple[bytes, bytes]], *, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body; raises ApiError 413, 415 or 408, or ClientDisconnected."""
    encoding = next((value for key, value in headers if key == b"content-encoding"), b"identity")
    if encoding.strip().lower() not in (b"", b"identity"):
        raise ApiError(415, "the body must come as it is, without Content-Encoding", code="unsupported_encoding")
    announced = next((value for key, value in headers if key == b"content-length"), b"0")
    if announced.isdigit() and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    chunks: list[bytes] = []
    num_bytes = 0
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnected
                chunk = message.get("body", b"")
                num_bytes += len(chunk)
                if num_bytes > max_bytes:
                    raise _too_large(max_bytes)
                chunks.append(chunk)
                if not message.get("more_body", False):
                    return b"".join(chunks)
    except TimeoutError:
        raise ApiError(408, f"the request body did not arrive within {timeout_s:g} s", code="body_timeout") from None


def prepare_body(body: bytes, identity: Identity, system_prompts: SystemPrompts, *, max_choices: int) -> dict[str, Raw]:
    """The fields of the body for the engine; raises ApiError (400) saying what is wrong with the client's.

    Who named no domain gets that of the system prompt.
    """
    fields = _parse(body)
    for name in _INTERNAL_FIELDS:
        if bytes(fields.get(name, b"null")) != b"null":
            raise ApiError(400, f"{name} is internal to the server; leave it out", code="internal_field", param=name)
    if bytes(fields.get(_GUIDED, b"null"))[:1] not in (b"n", b"{"):
        raise ApiError(400, f"{_GUIDED} must be an object", code="bad_structured_outputs", param=_GUIDED)
    if _PRIORITY in fields:
        _check_priority(fields[_PRIORITY])
    _check_choices(fields, max_choices)
    xargs = _client_xargs(fields)
    if identity.domain == DEFAULT_LABEL and (domain := system_prompts.domain_of(fields.get("messages"))):
        identity = replace(identity, domain=domain)
    encode = msgspec.json.encode
    xargs.update((name, Raw(encode(value))) for name, value in identity.engine_args().items())
    fields["vllm_xargs"] = Raw(encode(xargs))
    return fields


def _parse(body: bytes) -> dict[str, Raw]:
    try:
        # Values are not parsed here, so a string that is no UTF-8 would pass and fail in the engine.
        body.decode()
        return _object_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not a JSON object: {error}", code="invalid_json") from None


def _check_priority(value: Raw) -> None:
    try:
        _priority_decoder.decode(value)
    except (msgspec.DecodeError, RecursionError):
        # As with choices, the engine would make a number of "-1" and -1.0.
        message = f"priority must be an integer of at least {USERS_PRIORITY}, which is what requests have that name none"
        raise ApiError(400, message, code="bad_priority", param=_PRIORITY) from None


def _check_choices(fields: dict[str, Raw], max_choices: int) -> None:
    try:
        count = _count_decoder.decode(fields.get("n", b"null"))
    except (msgspec.DecodeError, RecursionError):
        # The engine would turn "1000" and 1000.0 into the number, past this bound.
        raise ApiError(400, "n must be an integer", code="bad_choices", param="n") from None
    num_choices = 1 if count is None else count
    if num_choices > max_choices:
        raise ApiError(400, f"n must be at most {max_choices}, got {num_choices}", code="too_many_choices", param="n")
    total = sum(num_prompts(bytes(fields[name])) for name in _PROMPT_FIELDS if name in fields)
    if num_choices * total > max_choices:
        message = f"n times the number of prompts must be at most {max_choices}, got {num_choices} times {total}"
        raise ApiError(400, message, code="too_many_choices", param="prompt")


def num_prompts(value: bytes) -> int:
    """How many prompts a field holds: a list is one prompt where it lists token ids, else one prompt per element.

    Raises ApiError (400) where it is nested too deeply to tell.
    """
    if not value.startswith(b"["):
        return int(value != b"null")
    if value[1:].lstrip()[:1] in _NUMBER_STARTS:
        return 1
    try:
        return len(_list_decoder.decode(value))
    except RecursionError:
        raise nested_too_deeply("prompt") from None


def _client_xargs(fields: dict[str, Raw]) -> dict[str, Raw]:
    try:
        xargs = _xargs_decoder.decode(fields.get("vllm_xargs", b"null")) or {}
    except RecursionError:
        raise nested_too_deeply("vllm_xargs") from None
    except msgspec.DecodeError as error:
        raise ApiError(400, f"vllm_xargs is not an object: {error}", code="bad_xargs", param="vllm_xargs") from None
    reserved = sorted(name for name in xargs if name.startswith(_OUR_PREFIX))
    internal = sorted(name for name in xargs if name in _INTERNAL_XARGS)
    if internal:
        raise ApiError(
            400,
            f"vllm_xargs keys {internal} are internal to the server; leave them out",
            code="internal_field",
            param="vllm_xargs",
        )
    if reserved:
        raise ApiError(
            400,
            f"vllm_xargs keys {reserved} are reserved; use the X-Paceline-Capture, -Tenant and -Domain headers",
            code="reserved_xargs",
            param="vllm_xargs",
        )
    return xargs


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the request body is larger than {max_bytes} bytes", code="body_too_large")
