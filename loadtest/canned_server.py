"""A chat server that costs next to nothing: canned streams of one-token chunks. The load tester's own speed shows in front of it.

It reads nothing of a request but `max_tokens` and answers every path. The mock engine, which speaks an engine's whole
protocol, is several times slower than the client it would have to outrun.

Run: python -m loadtest.canned_server --port 8100 --between-tokens-s 0.02
"""

from __future__ import annotations

import argparse
import asyncio
import re
import signal
from typing import cast

import httptools
import uvloop

MODEL = "canned"
_MAX_TOKENS = re.compile(rb'"max_tokens":\s*(\d+)')
_DEFAULT_MAX_TOKENS = 16
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_START = b'{"id":"chatcmpl-canned","object":"chat.completion.chunk","created":1,"model":"canned","choices":['


def _event(data: bytes) -> bytes:
    body = b"data: " + data + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(body), body)


_TOKEN = _event(_START + b'{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null}]}')
_LAST = _event(_START + b'{"index":0,"delta":{"content":" end"},"logprobs":null,"finish_reason":"length"}]}')
_MODELS = b'{"object":"list","data":[{"id":"canned","object":"model"}]}'
_PLAIN = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(_MODELS), _MODELS)
_NOT_FOUND = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"


def ending(num_tokens: int) -> bytes:
    """What follows the last token: the count, the end mark, the end of the body."""
    usage = b'],"usage":{"prompt_tokens":8,"completion_tokens":%d,"total_tokens":%d}}' % (num_tokens, 8 + num_tokens)
    return _event(_START + usage) + _event(b"[DONE]") + b"0\r\n\r\n"


class CannedConnection(asyncio.Protocol):
    """One keep-alive connection, one request at a time."""

    def __init__(self, between_tokens_s: float) -> None:
        self._between_tokens_s = between_tokens_s
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""
        self._url = b""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, _error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def on_message_begin(self) -> None:
        """Of httptools."""
        self._body = b""
        self._url = b""

    def on_url(self, url: bytes) -> None:
        """Of httptools."""
        self._url += url

    def on_body(self, body: bytes) -> None:
        """Of httptools."""
        self._body += body

    def on_message_complete(self) -> None:
        """Of httptools."""
        if self._parser.get_method() != b"POST":
            self._transport.write(_PLAIN if self._url == b"/v1/models" else _NOT_FOUND)
            return
        found = _MAX_TOKENS.search(self._body)
        num_tokens = int(found[1]) if found else _DEFAULT_MAX_TOKENS
        if self._between_tokens_s:
            self._transport.write(_HEAD)
            self._next(num_tokens, num_tokens)
        else:
            self._transport.write(_HEAD + _TOKEN * (num_tokens - 1) + _LAST + ending(num_tokens))

    def _next(self, num_left: int, num_tokens: int) -> None:
        if num_left == 1:
            self._transport.write(_LAST + ending(num_tokens))
            return
        self._transport.write(_TOKEN)
        self._timer = asyncio.get_running_loop().call_later(self._between_tokens_s, self._next, num_left - 1, num_tokens)


async def serve(port: int, between_tokens_s: float) -> None:
    """Answer on loopback until SIGTERM or SIGINT."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = await loop.create_server(lambda: CannedConnection(between_tokens_s), "127.0.0.1", port, backlog=4096)
    await stop.wait()
    server.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m loadtest.canned_server", description="A chat server that costs nothing.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--between-tokens-s", type=float, default=0.0, help="seconds between tokens (default 0: one write)")
    options = parser.parse_args()
    uvloop.run(serve(options.port, options.between_tokens_s))


if __name__ == "__main__":
    main()
