"""Exchange: one client request on its way through the gateway, what its legs ask of engines, and what the client got so far.

A leg is one request to one engine. An exchange has one, or one to a prefill engine and one to a decode engine, or more where
engines die under it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
from msgspec import Raw
from starlette.types import Send

from server.admission import RETRY_AFTER_S
from server.errors import ApiError, nested_too_deeply
from server.fleet import Engine
from server.relay.sse import ABORTED, reports_death

Fields = dict[str, Raw]
"""The top level of a JSON body, its values untouched."""
FULL_REPORT: Fields = {"kv_cache_report_mode": Raw(b'"full"')}
"""Extra arguments with which vLLM tells of the cached blocks a request reuses, too (v1/core/kv_cache_manager.py)."""

_xargs_decoder = msgspec.json.Decoder(Fields)


def with_xargs(fields: Fields, xargs: Fields) -> Raw:
    """The extra arguments for the engine of a body that has passed our checks, with some more.

    Raises ApiError (400) where they are nested too deeply.
    """
    try:
        sent = _xargs_decoder.decode(fields.get("vllm_xargs", b"{}"))
    except RecursionError:
        raise nested_too_deeply("vllm_xargs") from None
    return Raw(msgspec.json.encode(sent | xargs))


def versioned_salt(target_version: int | None, rest: str) -> str:
    """KV of different salts is never shared, so neither is that of two targets."""
    return f"target-{target_version}:{rest}"


def salted_for(fields: Fields, engine: Engine) -> Raw:
    """The versioned salt of these fields, of the target that `engine` computes with."""
    _, _, rest = msgspec.json.decode(fields["cache_salt"], type=str).partition(":")
    return Raw(msgspec.json.encode(versioned_salt(engine.target_version, rest)))


def tells_of_death(status: int, body: bytes | None) -> bool:
    """Whether an engine's answer says that its core is gone, or that it was told to stop and gave the answer up."""
    if body is None:
        return False
    return ABORTED in body if status < 500 else reports_death(body)


def engine_died() -> ApiError:
    """Of a request that has lost as many engines as it may, before its answer began."""
    return ApiError(503, "the engine failed; retry shortly", code="engine_error", retry_after_s=RETRY_AFTER_S)


@dataclass(slots=True)
class Exchange:
    """One client request."""

    method: str
    path: str
    request_id: str
    fields: Fields | None = None
    """The client's body with our arguments in it; None where the request has none."""
    session: str | None = None
    """What the client calls its conversation."""
    status: int = 0
    """Of the answer; 0 until it has begun."""
    has_ended: bool = False
    """Nothing more can be sent of the answer."""

    def upstream_headers(self) -> dict[str, str]:
        headers = {"X-Request-Id": self.request_id}
        if self.fields is not None:
            headers["Content-Type"] = "application/json"
        return headers


@dataclass(frozen=True, slots=True)
class Leg:
    """What is asked of one engine."""

    path: str
    fields: Fields | None
    token_ids: tuple[int, ...] | None = None
    """The prompt, where it is known without tokenizing."""
    target_version: int | None = None
    """Where set, only engines that serve this target may answer: the answer has begun with it."""

    def body(self, **changes: object) -> bytes | None:
        """The JSON body, with these fields put in."""
        if self.fields is None:
            return None
        return msgspec.json.encode({**self.fields, **changes} if changes else self.fields)


@dataclass(slots=True)
class Trip:
    """Which engines one exchange has been to and may not go to again, and how often it may still move."""

    num_moves_left: int
    _left: dict[Engine, str] = field(default_factory=dict)

    def excluded(self) -> set[Engine]:
        """An engine that came back as another process is not the one that was left."""
        return {engine for engine, epoch in self._left.items() if engine.epoch == epoch}

    def leave(self, engine: Engine) -> None:
        """It did not take the request."""
        self._left[engine] = engine.epoch

    def lose(self, engine: Engine) -> bool:
        """It died with the request; False when the request has lost as many engines as it may."""
        self.leave(engine)
        self.num_moves_left -= 1
        return self.num_moves_left >= 0


class Client:
    """The client's side of an exchange: one head, then bytes, then the end."""

    def __init__(self, exchange: Exchange, send: Send, on_first_byte: Callable[[], None]) -> None:
        self._exchange = exchange
        self._send = send
        self._on_first_byte = on_first_byte

    @property
    def has_begun(self) -> bool:
        return self._exchange.status != 0

    async def answer(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        """A whole answer."""
        headers = [*headers, (b"content-length", str(len(body)).encode())]
        await self._begin(status, headers)
        await self.end(body)

    async def stream(self, events: bytes, status: int, headers: Callable[[], list[tuple[bytes, bytes]]]) -> None:
        """Some events; the head goes with the first."""
        is_first = not self.has_begun
        if is_first:
            await self._begin(status, headers())
        await self._send({"type": "http.response.body", "body": events, "more_body": True})
        if is_first:
            self._on_first_byte()

    async def end(self, last: bytes = b"") -> None:
        self._exchange.has_ended = True
        await self._send({"type": "http.response.body", "body": last})

    async def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._exchange.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})


@dataclass(frozen=True, slots=True)
class Head:
    """Where an answer comes from, as its headers tell the client."""

    engine: Engine
    kv_path: str
    """`combined`, `remote_prefill`, `kv_reuse` or `recompute`; empty for what is no generation."""
    status: int
    content_type: str = "application/json"
    retry_after: str | None = None

    def headers(self, request_id: str) -> list[tuple[bytes, bytes]]:
        headers = [(b"content-type", self.content_type.encode("latin-1")), (b"x-request-id", request_id.encode())]
        for name, value in (
            (b"x-paceline-draft-version", self.engine.draft_version),
            (b"x-paceline-target-version", self.engine.target_version),
            (b"x-paceline-kv-path", self.kv_path or None),
        ):
            if value is not None:
                headers.append((name, str(value).encode()))
        if self.status in (429, 503):
            headers.append((b"retry-after", (self.retry_after or str(RETRY_AFTER_S)).encode("latin-1")))
        return headers
