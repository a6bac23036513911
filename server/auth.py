"""BearerAuth: every request of an application needs the token, unknown routes included."""

from __future__ import annotations

import hmac
from typing import Any

from server.body import Receive
from server.completions import send_error
from server.errors import ApiError
from server.relay.exchange import Send


class BearerAuth:
    """ASGI middleware."""

    def __init__(self, app: Any, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            if not hmac.compare_digest(given, self._expected):
                message = "send 'Authorization: Bearer <operator token>'; `paceline up` keeps it in run/operator.token of its state directory"
                await send_error(send, ApiError(401, message, code="unauthorized"))
                return
        await self._app(scope, receive, send)
