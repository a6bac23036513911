"""The public port: the OpenAI routes, rollouts, liveness, readiness and metrics."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from server.completions import ModelRoute, send_error
from server.errors import ApiError, as_api_error, http_error, internal_error
from server.fleet import Fleet
from server.paths import CHAT_PATH, COMPLETIONS_PATH, GENERATE_PATH
from wire.errors import PacelineError

MODEL_ROUTES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (CHAT_PATH, ("POST",)),
    (COMPLETIONS_PATH, ("POST",)),
    (GENERATE_PATH, ("POST",)),
    ("/v1/models", ("GET",)),
)
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def public_app(*, fleet: Fleet, route: Callable[[str], ModelRoute], metrics_text: Callable[[], Awaitable[bytes]]) -> ASGIApp:
    """The application of the public port.

    Model routes do not pass through the framework: its layers would wrap every chunk of every stream.
    """
    rest = _framework_app(fleet, metrics_text)
    models = {path: (methods, route(path)) for path, methods in MODEL_ROUTES}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        methods, model = models.get(scope.get("path", ""), ((), None))
        if model is None or scope["type"] != "http":
            await rest(scope, receive, send)
        elif scope["method"] in methods:
            await model(scope, receive, send)
        else:
            await send_error(send, http_error(405, f"{scope['method']} {scope['path']}: use {methods[0]}"))

    return app


def _framework_app(fleet: Fleet, metrics_text: Callable[[], Awaitable[bytes]]) -> FastAPI:
    app = FastAPI(title="Paceline", openapi_url=None)
    install_error_shapes(app)

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        """The gateway's process lives."""
        return json_response({"status": "ok"})

    @app.api_route("/ready", methods=["GET", "HEAD"])
    async def ready() -> Response:
        """At least one engine is up with our parts verified."""
        reason = fleet.why_not_ready()
        if reason:
            raise ApiError(503, reason, code="not_ready", retry_after_s=fleet.retry_after_s())
        return json_response({"status": "ready", "engines": [engine.id for engine in fleet.ready()]})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await metrics_text(), media_type=METRICS_TYPE)

    return app


def json_response(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


def error_response(error: ApiError) -> Response:
    return Response(error.body(), status_code=error.status, media_type="application/json", headers=error.headers)


def install_error_shapes(app: FastAPI) -> None:
    """Every error of an application leaves in OpenAI's shape."""

    @app.exception_handler(PacelineError)
    async def on_our_error(request: Request, error: PacelineError) -> Response:
        return error_response(as_api_error(error))

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        what = f"{request.method} {request.url.path}: {error.detail}"
        return error_response(http_error(error.status_code, what))

    @app.exception_handler(Exception)
    async def on_fault(request: Request, error: Exception) -> Response:
        return error_response(internal_error())
