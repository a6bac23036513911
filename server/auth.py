"""BearerAuth: every request of an application needs the token, unknown routes included."""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from server.completions import send_error
from server.errors import ApiError


class BearerAuth:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            if not hmac.compare_digest(given, self._expected):
                message = "send 'Authorization: Bearer <operator token>'; `paceline up` keeps it in run/operator.token of its state directory"
                await send_error(send, ApiError(401, message, code="unauthorized"))
                return
        await self._app(scope, receive, send)
