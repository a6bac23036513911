"""The admin port: status, drafts, versions of the target, the learner and capture. Versions are integers here; no route takes a path or a URL."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import msgspec
from fastapi import FastAPI, Request, Response

from server.admin_body import read_struct
from server.auth import BearerAuth
from server.drafts import Drafts
from server.errors import ApiError, SwapInProgress, as_api_error
from server.fleet import Engine, Fleet
from server.health import HealthMonitor
from server.idempotency import Answer, IdempotencyCache
from server.learner_link import LearnerLink
from server.public import install_error_shapes, json_response
from server.state.admin import state_routes
from server.state.store import StateStore
from server.swap import SwapCoordinator
from server.target_swap import TargetCoordinator
from wire.control import ActivateRequest, AdminStatus, CaptureRequest, DrainView, LearnerReport
from wire.errors import PacelineError
from wire.store import VERSION_NAME
from wire.target_control import ActivateTargetRequest, RollBackTargetRequest


class RollBackRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """operator -> gateway: POST /admin/drafts/rollback. The body may be left out."""

    expected_active: int | None = None


def admin_app(
    *,
    token: str,
    fleet: Fleet,
    swap: SwapCoordinator,
    drafts: Drafts,
    learner: LearnerLink,
    health: HealthMonitor,
    status: Callable[[], AdminStatus],
    routing: Callable[[str | None], msgspec.Struct],
    stores: Sequence[StateStore],
    target: TargetCoordinator,
) -> FastAPI:
    """The application of the admin port."""
    app = FastAPI(title="Paceline admin", openapi_url=None)
    install_error_shapes(app)
    app.add_middleware(BearerAuth, token=token)
    _add_draft_routes(app, swap, drafts)
    _add_target_routes(app, target)
    _add_learner_routes(app, learner, drafts, target)
    _add_engine_routes(app, fleet)
    app.include_router(state_routes(stores))

    @app.get("/admin/status")
    async def get_status() -> Response:
        return json_response(status())

    @app.get("/admin/routing")
    async def get_routing(request_id: str | None = None) -> Response:
        """What the router knows, and its latest decisions with their costs, or those of one request."""
        return json_response(routing(request_id))

    @app.post("/admin/capture")
    async def set_capture(request: Request) -> Response:
        rate = (await read_struct(request, CaptureRequest)).rate
        if not 0.0 <= rate <= 1.0:
            raise ApiError(
                400, f"rate is the share of requests to capture, 0 to 1, got {rate:g}", code="bad_rate", param="rate"
            )
        problems = await health.set_capture_rate(rate)
        if problems:
            detail = "; ".join(problems.values())
            raise ApiError(502, f"remembered, but not yet in force everywhere: {detail}", code="engine_error")
        return json_response({"rate": rate})

    return app


def _add_draft_routes(app: FastAPI, swap: SwapCoordinator, drafts: Drafts) -> None:
    answers = IdempotencyCache()

    @app.get("/admin/drafts")
    async def list_drafts() -> Response:
        return json_response(await drafts.listing())

    @app.get("/admin/drafts/{version}")
    async def show_draft(version: str) -> Response:
        return json_response(await drafts.entry(_version(version)))

    @app.post("/admin/drafts/rollback")
    async def roll_back(request: Request) -> Response:
        body = await read_struct(request, RollBackRequest, default=b"{}")
        return await _once(answers, request, body, lambda: swap.roll_back(body.expected_active))

    @app.post("/admin/drafts/{version}/activate")
    async def activate(version: str, request: Request) -> Response:
        number = _version(version)
        body = await read_struct(request, ActivateRequest)
        return await _once(answers, request, body, lambda: swap.activate(number, body))


def _add_target_routes(app: FastAPI, target: TargetCoordinator) -> None:
    answers = IdempotencyCache()

    @app.get("/admin/targets")
    async def list_targets() -> Response:
        return json_response(await target.listing())

    @app.post("/admin/targets/rollback")
    async def roll_back(request: Request) -> Response:
        body = await read_struct(request, RollBackTargetRequest)
        return await _once(answers, request, body, lambda: target.roll_back(body))

    @app.post("/admin/targets/{version}/activate")
    async def activate(version: str, request: Request) -> Response:
        number = _version(version)
        body = await read_struct(request, ActivateTargetRequest)
        return await _once(answers, request, body, lambda: target.activate(number, body))


def _add_learner_routes(app: FastAPI, learner: LearnerLink, drafts: Drafts, target: TargetCoordinator) -> None:
    @app.post("/admin/learner/report")
    async def report(request: Request) -> Response:
        body = await read_struct(request, LearnerReport)
        if drafts.active is None:
            raise ApiError(503, "no engine has told its draft yet", code="not_ready", retry_after_s=1)
        return json_response(learner.receive(body, drafts.active, target.targets.active))

    @app.post("/admin/learner/pause")
    async def pause() -> Response:
        learner.is_paused = True
        return json_response(learner.view())

    @app.post("/admin/learner/resume")
    async def resume() -> Response:
        learner.is_paused = False
        return json_response(learner.view())


def _add_engine_routes(app: FastAPI, fleet: Fleet) -> None:
    def find(engine_id: str) -> Engine:
        engine = fleet.find(engine_id)
        if engine is None:
            known = sorted(one.id for one in fleet.engines)
            raise ApiError(404, f"there is no engine {engine_id[:80]!r}; there are {known}", code="engine_not_found")
        return engine

    @app.post("/admin/engines/{engine_id}/drain")
    async def drain(engine_id: str) -> Response:
        """Nothing new goes to the engine; what it has, it ends. Ask again until it is drained.

        An engine that was started again takes requests; so does every engine once the gateway was. Asking again sets it anew.
        """
        return json_response(_set_draining(find(engine_id), True))

    @app.post("/admin/engines/{engine_id}/undrain")
    async def undrain(engine_id: str) -> Response:
        return json_response(_set_draining(find(engine_id), False))


def _set_draining(engine: Engine, is_draining: bool) -> DrainView:
    engine.is_draining = is_draining
    return DrainView(
        id=engine.id,
        is_draining=engine.is_draining,
        is_drained=engine.is_drained,
        num_in_flight=engine.num_in_flight,
        lease_left_s=round(engine.lease_left_s, 3),
    )


def _version(text: str) -> int:
    if not VERSION_NAME.fullmatch(text):
        raise ApiError(400, f"a version is a plain non-negative integer, got {text[:80]!r}", code="bad_version")
    return int(text)


async def _once(
    answers: IdempotencyCache, request: Request, body: msgspec.Struct, work: Callable[[], Awaitable[msgspec.Struct]]
) -> Response:
    """Do a swap, once per idempotency key; its errors are answers too."""

    async def attempt() -> Answer:
        try:
            return Answer(200, msgspec.json.encode(await work()), is_final=True)
        except PacelineError as error:
            failure = as_api_error(error)
            is_final = failure.status < 500 and not isinstance(error, SwapInProgress)
            return Answer(failure.status, failure.body(), is_final)

    identity = request.url.path.encode() + b"\0" + msgspec.json.encode(body)
    answer = await answers.once(request.headers.get("idempotency-key"), identity, attempt)
    headers = {"retry-after": "1"} if answer.status == 503 else {}
    return Response(answer.body, status_code=answer.status, media_type="application/json", headers=headers)
