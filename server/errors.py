"""How errors look on both ports: OpenAI's shape, one stable `code`, one message a person can act on.

This module owns the mapping from our exceptions to HTTP. It does not know routes.
"""

from __future__ import annotations

from http import HTTPStatus

import msgspec

from server.disk import DiskStuck
from server.state.store import StateHeld, StateNotFound, StateUnsupported
from wire.errors import ArtifactError, EngineError, PacelineError, SpecMismatch, StaleExpectation, SwapError, WireError

_MAX_QUOTED_BYTES = 500


class _Message(msgspec.Struct):
    message: str


class _AnError(msgspec.Struct):
    error: _Message


class ApiError(PacelineError):
    """An answer that is an error, ready to be sent."""

    def __init__(
        self, status: int, message: str, *, code: str, param: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}

    def body(self) -> bytes:
        return error_body(self.status, str(self), code=self.code, param=self.param)


class DraftNotFound(ArtifactError):
    """No such version in the store."""

    code = "draft_not_found"


class TargetNotFound(ArtifactError):
    """No such version of the target in the store."""

    code = "target_not_found"


class SwapInProgress(SwapError):
    """One swap at a time."""

    code = "swap_in_progress"


class NoEngineReady(SwapError):
    """There is nothing to commit on."""

    code = "no_engine_ready"


class EngineRefused(EngineError):
    """An engine answered a private route with an error."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


_STATUS_BY_TYPE: tuple[tuple[type[PacelineError], int], ...] = (
    (DraftNotFound, 404),
    (TargetNotFound, 404),
    (DiskStuck, 503),
    (ArtifactError, 422),
    (SpecMismatch, 422),
    (StaleExpectation, 409),
    (NoEngineReady, 503),
    (SwapError, 409),
    (StateNotFound, 404),
    (StateHeld, 409),
    (StateUnsupported, 501),
    (WireError, 422),
    (EngineError, 502),
)


def as_api_error(error: PacelineError) -> ApiError:
    """The HTTP answer to one of our exceptions."""
    if isinstance(error, ApiError):
        return error
    status = next((status for kind, status in _STATUS_BY_TYPE if isinstance(error, kind)), 500)
    if isinstance(error, EngineRefused) and 400 <= error.status < 500:
        status = error.status if error.status in (409, 422) else 502
    return ApiError(status, str(error), code=error.code, retry_after_s=1 if status == 503 else None)


def error_type(status: int) -> str:
    """OpenAI's `error.type` for a status."""
    match status:
        case 401:
            return "authentication_error"
        case 404:
            return "not_found_error"
        case 409:
            return "conflict_error"
        case 429:
            return "rate_limit_error"
        case 503:
            return "service_unavailable_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def error_body(status: int, message: str, *, code: str, param: str | None = None) -> bytes:
    error = {"message": message, "type": error_type(status), "param": param, "code": code}
    return msgspec.json.encode({"error": error})


def in_openai_shape(status: int, body: bytes) -> bytes:
    """An engine's error as clients know errors: as it is where it is one, else its words in our shape."""
    try:
        if msgspec.json.decode(body, type=_AnError).error.message:
            return body
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    words = body[:_MAX_QUOTED_BYTES].decode(errors="replace").strip() or HTTPStatus(status).phrase
    return error_body(status, f"the engine answered: {words}", code="engine_error")


def error_event(message: str, *, code: str) -> bytes:
    """One SSE event that ends a stream which cannot go on."""
    return b"data: " + error_body(502, message, code=code) + b"\n\n"


def nested_too_deeply(name: str) -> ApiError:
    """Of a field that cannot be read here. How deep is too deep depends on the caller's own stack, so each reader may find it."""
    return ApiError(400, f"{name} is nested too deeply", code="invalid_json", param=name)


def stopping() -> ApiError:
    """For what a server that ends cannot finish."""
    return ApiError(503, "the server is stopping; retry", code="server_stopping", retry_after_s=5)


def internal_error() -> ApiError:
    """For what should not happen."""
    return ApiError(500, "the gateway failed; its log says why", code="internal_error")


def http_error(status: int, detail: str) -> ApiError:
    """For what the web framework itself refuses: unknown routes, wrong methods."""
    code = HTTPStatus(status).phrase.lower().replace(" ", "_")
    return ApiError(status, detail, code=code)
