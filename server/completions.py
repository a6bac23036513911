"""The public model routes as plain ASGI: admission, body, relay, and one way to end for each way a request can end.

Plain ASGI rather than a framework handler, because the client's disconnect must reach the engine while its answer streams.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from starlette.types import Receive, Scope, Send

from server.admission import Admission
from server.body import ClientDisconnected, prepare_body, read_body
from server.domains import SystemPrompts
from server.errors import ApiError, error_event, internal_error, stopping
from server.identity import Identity, read_identity, read_request_id
from server.relay.exchange import Exchange, Fields
from server.relay.proxy import Proxy, StreamBroken, first_to_end
from server.traffic import DISCONNECTED, REFUSED, SERVED, Timer, Traffic

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499


class ModelRoute:
    """One route that is answered by an engine."""

    def __init__(
        self, path: str, proxy: Proxy, admission: Admission, traffic: Traffic, last_call: Callable[[], Awaitable[object]]
    ) -> None:
        """`last_call` returns when the server is about to close what is not answered by then."""
        self.path = path
        self._last_call = last_call
        self._proxy = proxy
        self._admission = admission
        self._traffic = traffic
        self._system_prompts = SystemPrompts()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        timer = Timer(self.path)
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        exchange = Exchange(scope["method"], self.path, read_request_id(headers))
        try:
            if exchange.method == "POST":
                await self._read(exchange, headers, receive)
            with self._admission.slot():
                work = self._proxy.relay(exchange, send, on_first_byte=lambda: self._traffic.first_byte(timer))
                ended = await first_to_end(work, _disconnected(receive), self._last_call())
                if ended == 1:
                    raise ClientDisconnected
                if ended == 2:
                    raise stopping()
            timer.status = exchange.status
            timer.outcome = SERVED if exchange.status < 400 else REFUSED if exchange.status < 500 else timer.outcome
        except ApiError as error:
            timer.status = error.status
            timer.outcome = REFUSED if error.status < 500 else timer.outcome
            await _end_with(error, exchange, send)
        except StreamBroken as error:
            timer.status = exchange.status
            logger.error("request %s was cut short: %s", exchange.request_id, error)
        except ClientDisconnected:
            timer.status, timer.outcome = CLIENT_CLOSED_REQUEST, DISCONNECTED
        except Exception:
            # Nothing of ours is around this: a fault must end one request, in OpenAI's shape, and be seen.
            logger.exception("request %s met a fault of the gateway", exchange.request_id)
            await _end_with(internal_error(), exchange, send)
        finally:
            self._traffic.finished(timer)

    async def _read(self, exchange: Exchange, headers: list[tuple[bytes, bytes]], receive: Receive) -> None:
        """Fill in what the client sent."""
        settings = self._admission.settings
        identity = read_identity(headers, exchange.request_id)
        with self._admission.reading():
            body = await read_body(receive, headers, max_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s)
        exchange.fields = self._prepare(body, identity)
        exchange.session = identity.session

    def _prepare(self, body: bytes, identity: Identity) -> Fields:
        """What the engine gets of the client's body; raises ApiError (400)."""
        return prepare_body(body, identity, self._system_prompts, max_choices=self._admission.settings.max_choices)


async def _end_with(error: ApiError, exchange: Exchange, send: Send) -> None:
    """Tell the client in the way that is left: as the whole answer, or as the last event of one that has begun."""
    if not exchange.status:
        await send_error(send, error, exchange.request_id)
    elif not exchange.has_ended:
        await send({"type": "http.response.body", "body": error_event(str(error), code=error.code)})


async def send_error(send: Send, error: ApiError, request_id: str | None = None) -> None:
    """Send an ApiError as a whole answer."""
    body = error.body()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.encode(), value.encode()) for name, value in error.headers.items()]
    if request_id is not None:
        headers.append((b"x-request-id", request_id.encode()))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
