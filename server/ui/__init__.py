"""The live page of the admin port: static files, served without a token. They hold no data; the page asks for it with the token."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from server.completions import send_error
from server.errors import ApiError, http_error

PATH = "/ui"
INDEX = "index.html"
TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # A gateway of another release must not be shown by this one's page.
    "cache-control": "no-cache",
}


class LivePage:
    """ASGI: answers `/ui` and what lies below it, and hands everything else on to the admin application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._files = _read_files()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] == "http" and (path == PATH or path.startswith(f"{PATH}/")):
            await self._answer(scope["method"], path, send)
        else:
            await self._app(scope, receive, send)

    async def _answer(self, method: str, path: str, send: Send) -> None:
        if method not in ("GET", "HEAD"):
            await send_error(send, http_error(405, f"{method} {path}: use GET"))
            return
        name = path[len(PATH) :].lstrip("/") or INDEX
        if name not in self._files:
            await send_error(send, ApiError(404, f"the live page has no file {name[:80]!r}", code="not_found"))
            return
        body, media_type = self._files[name]
        await send({"type": "http.response.start", "status": 200, "headers": _header_list(media_type, len(body))})
        await send({"type": "http.response.body", "body": body if method == "GET" else b""})


def _read_files() -> dict[str, tuple[bytes, str]]:
    """Content and media type by name; read once, so that no request touches the disk."""
    found: dict[str, tuple[bytes, str]] = {}
    for item in files(__name__).iterdir():
        suffix = item.name[item.name.rfind(".") :]
        if suffix in TYPES:
            found[item.name] = (item.read_bytes(), TYPES[suffix])
    return found


def _header_list(media_type: str, num_bytes: int) -> list[tuple[bytes, bytes]]:
    headers: dict[str, Any] = {"content-type": media_type, "content-length": num_bytes} | _HEADERS
    return [(name.encode(), str(value).encode()) for name, value in headers.items()]
