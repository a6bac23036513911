"""BoundedHttp: uvicorn's HTTP protocol, with bounds on what a client holds before its request is there.

uvicorn bounds neither the size of a request's head nor the time it may take, and takes connections until the process has no
file descriptor left, for its own calls to engines either. Bodies are `server/body.py`'s affair.
"""

from __future__ import annotations

import asyncio
import resource
from http import HTTPStatus
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.errors import ApiError

MAX_HEAD_BYTES = 64 * 1024
"""Of the request line with the headers. Also of what follows a body in chunks, which nobody reads."""
HEAD_TIMEOUT_S = 20.0
WANTED_FILES = 65_536
RESERVED_FILES = 128
"""Descriptors that are no client's: sockets to engines, the operator's connections, files."""
FILES_PER_CONNECTION = 3
"""The client's, the engine's, and one for the other port, whose connections count apart."""
_HEAD = b"HTTP/1.1 "


class BoundedHttp(HttpToolsProtocol):
    """One connection of a client."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, _JoinedHead(transport, self.loop)))
        self._num_head_bytes = 0
        self._is_in_head = True
        self._too_late: asyncio.TimerHandle | None = None
        if len(self.connections) > max_connections():
            self._refuse(ApiError(503, "too many connections are open; retry", code="too_many_connections", retry_after_s=1))
        else:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_there()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._got_on = False
        try:
            super().data_received(data)
        except UnicodeDecodeError:
            self._refuse(ApiError(400, "the request's path is not ASCII; percent-encode it", code="bad_path"))
            return
        # A read may hold the end of a head and much of a body, so a read that completed something counts for nothing.
        self._num_head_bytes = 0 if self._got_on else self._num_head_bytes + len(data)
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self._refuse(ApiError(431, f"the request's headers exceed {MAX_HEAD_BYTES} bytes", code="headers_too_large"))
        elif self._is_in_head and (self.cycle is None or self.cycle.response_complete):
            self._await_head()

    def on_headers_complete(self) -> None:
        self._got_on, self._is_in_head = True, False
        self._head_is_there()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._got_on = True
        super().on_body(body)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:
            super().on_header(name, value)

    def on_message_complete(self) -> None:
        self._got_on, self._is_in_head = True, True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, msg, code="bad_request"))

    def _await_head(self) -> None:
        if self._too_late is None and not self.transport.is_closing():
            error = ApiError(408, f"the request's headers did not arrive within {HEAD_TIMEOUT_S:g} s", code="head_timeout")
            self._too_late = self.loop.call_later(HEAD_TIMEOUT_S, self._refuse, error)

    def _head_is_there(self) -> None:
        if self._too_late is not None:
            self._too_late.cancel()
            self._too_late = None

    def _refuse(self, error: ApiError) -> None:
        """One whole answer, and the end of the connection."""
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(_answer(error))
        self.transport.close()


class _JoinedHead:
    """A transport that keeps an answer's head for what follows it, so that both reach the client at once.

    By itself a head would cost a system call here and a wake-up there, right before the first token. All else is the
    transport's own.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._head and data.startswith(_HEAD):
            self._head = data
            # An answer without a body has nothing else to send it.
            self._loop.call_soon(self._send_head)
        else:
            head, self._head = self._head, b""
            self._transport.write(head + data)

    def close(self) -> None:
        self._send_head()
        self._transport.close()

    def _send_head(self) -> None:
        if self._head:
            self.write(b"")


def raise_file_limit() -> None:
    """Take as many descriptors as this process may have, within reason; shells start programs with 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def max_connections() -> int:
    """Clients of one port at a time."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = WANTED_FILES if soft == resource.RLIM_INFINITY else soft
    return max((files - RESERVED_FILES) // FILES_PER_CONNECTION, 1)


def _answer(error: ApiError) -> bytes:
    body = error.body()
    headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close", **error.headers}
    lines = [
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body
