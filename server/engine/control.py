"""ControlPlugin: the private routes of an engine, `/paceline/*`, an endpoint plugin in vLLM's API server.

Bearer token on every route. vLLM's dev mode stays off: these routes reach the engine through its client only.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.datastructures import State
from vllm.v1.engine.exceptions import EngineDeadError

from server.engine.answer_limits import read_answer_limits
from server.engine.depth import UTILITY
from server.engine.generate_abilities import read_generate_abilities
from server.engine.pin import require_pinned_vllm
from server.engine.settings import engine_token, parts_config
from server.engine.target_change import TargetChange, TargetRefused
from wire.control import (
    CaptureRequest,
    CommitReport,
    CommitRequest,
    DepthRequest,
    DepthTable,
    Digest,
    EngineStatus,
    GenerateAbilities,
    KvLayout,
    StageRequest,
    WorkerStatus,
)
from wire.errors import ArtifactError, EngineError, PacelineError, SpecMismatch, StaleExpectation, SwapError
from wire.spec import SCHEMA_VERSION, CaptureSpec
from wire.target_control import TargetCommitReport, TargetCommitRequest

_STAGE_POLL_S = 0.1
_STAGE_DEADLINE_S = 120.0
_DEATH_POLL_S = 0.5
_STATUS_BY_CODE = {
    StaleExpectation.code: 409,
    SwapError.code: 409,
    TargetRefused.code: 409,
    ArtifactError.code: 422,
    SpecMismatch.code: 422,
}
_ERROR_BY_CODE = {kind.code: kind for kind in (StaleExpectation, SwapError, ArtifactError, SpecMismatch)}

Body = TypeVar("Body")
Reply = TypeVar("Reply")
Handler = Callable[[Request], Awaitable[Any]]


class ControlPlugin:
    """vLLM's `EndpointPlugin` protocol."""

    name = "paceline_control"
    required_tasks = None

    def attach_router(self, app: FastAPI) -> None:
        async def status(request: Request) -> EngineStatus:
            return await _control(request).status()

        async def stage(request: Request) -> StageRequest:
            return await _control(request).stage(await _body(request, StageRequest))

        async def commit(request: Request) -> CommitReport:
            return await _control(request).commit(await _body(request, CommitRequest))

        async def stage_target(request: Request) -> StageRequest:
            return await _control(request).stage(await _body(request, StageRequest), kind="target")

        async def commit_target(request: Request) -> TargetCommitReport:
            return await _control(request).commit_target(await _body(request, TargetCommitRequest))

        async def capture(request: Request) -> CaptureRequest:
            return await _control(request).set_capture(await _body(request, CaptureRequest))

        async def depth(request: Request) -> DepthTable:
            return await _control(request).set_depth(await _body(request, DepthRequest))

        async def digest(request: Request) -> Digest:
            return await _control(request).digest()

        app.get("/paceline/status", include_in_schema=False)(_guarded(status))
        app.post("/paceline/stage", include_in_schema=False)(_guarded(stage))
        app.post("/paceline/commit", include_in_schema=False)(_guarded(commit))
        app.post("/paceline/target/stage", include_in_schema=False)(_guarded(stage_target))
        app.post("/paceline/target/commit", include_in_schema=False)(_guarded(commit_target))
        app.post("/paceline/capture", include_in_schema=False)(_guarded(capture))
        app.post("/paceline/depth", include_in_schema=False)(_guarded(depth))
        app.get("/paceline/digest", include_in_schema=False)(_guarded(digest))

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        state.paceline_token = engine_token()
        abilities = read_generate_abilities(engine_client.vllm_config, args)
        state.paceline = EngineControl(engine_client, abilities)
        # The schedule an engine starts with may shrink K where many requests run, only to have graphs captured for every K.
        full = engine_client.vllm_config.speculative_config.num_speculative_tokens
        await engine_client.engine_core.call_utility_async(UTILITY, full)
        await state.paceline.target.label_base()


class EngineControl:
    """What the routes do. One stage or commit at a time."""

    def __init__(self, engine_client: Any, abilities: GenerateAbilities) -> None:
        self._engine = engine_client
        self._abilities = abilities
        self._answer_limits = read_answer_limits(engine_client.vllm_config.model_config)
        self._swapping = asyncio.Lock()
        self.target = TargetChange(engine_client, ask=self._ask, unless_dead=self._unless_dead)

    async def status(self) -> EngineStatus:
        answers = await self._rpc("paceline_status")
        depths = await self._unless_dead(self._engine.engine_core.call_utility_async(UTILITY, None))
        return EngineStatus(
            schema_version=SCHEMA_VERSION,
            engine_id=parts_config().engine_id,
            engine_epoch=answers[0]["epoch"],
            vllm_version=require_pinned_vllm(),
            spec=msgspec.convert(answers[0]["spec"], CaptureSpec),
            num_speculative_tokens=answers[0]["num_speculative_tokens"],
            depth=depths[0],
            kv=_whole_layout([msgspec.convert(answer["kv"], KvLayout) for answer in answers]),
            workers=[msgspec.convert(answer["worker"], WorkerStatus) for answer in answers],
            answer_limits=self._answer_limits,
            depths=depths,
            generate=self._abilities,
        )

    async def stage(self, request: StageRequest, *, kind: str = "draft") -> StageRequest:
        """Returns once every worker holds the version; raises what a worker refused it for."""
        async with self._swapping:
            await self._rpc("paceline_stage", kind, request.version)
            deadline_s = time.monotonic() + _STAGE_DEADLINE_S
            while time.monotonic() < deadline_s:
                answers = await self._rpc("paceline_stage_outcome", kind, request.version)
                if all(answer["staged"] for answer in answers):
                    return request
                await asyncio.sleep(_STAGE_POLL_S)
        raise EngineError(
            f"{kind} {request.version} was not staged within {_STAGE_DEADLINE_S:.0f} s; is the disk slow or full?"
        )

    async def commit(self, request: CommitRequest) -> CommitReport:
        """All ranks or none: a rank that refuses sends the others back."""
        async with self._swapping:
            started_s = time.perf_counter()
            answers = await self._ask("paceline_commit", request.version, request.expected_active)
            rpc_ms = (time.perf_counter() - started_s) * 1e3
            if any("error" in answer for answer in answers) and not all("error" in answer for answer in answers):
                await self._ask("paceline_commit", request.expected_active, request.version)
        _raise_refusals(answers)
        return CommitReport(
            version=request.version,
            previous=answers[0]["previous"],
            apply_ms=max(answer["apply_ms"] for answer in answers),
            rpc_ms=rpc_ms,
        )

    async def commit_target(self, request: TargetCommitRequest) -> TargetCommitReport:
        """All ranks or none, within the deadline; raises what it was refused for."""
        async with self._swapping:
            report, answers = await self.target.commit(request)
        _raise_refusals(answers)
        assert report is not None, "there is one where no worker refused"
        return report

    async def set_capture(self, request: CaptureRequest) -> CaptureRequest:
        """The rate now in force, which is 0 where capture is off; raises _BadRequest outside 0..1."""
        if not 0.0 <= request.rate <= 1.0:
            raise _BadRequest(f"rate must lie in 0..1, got {request.rate}")
        answers = await self._rpc("paceline_set_capture", request.rate)
        return CaptureRequest(rate=answers[0]["rate"])

    async def set_depth(self, request: DepthRequest) -> DepthTable:
        """What is now in force; raises _BadRequest where the engine core refuses it, EngineDeadError where it was dead before."""
        try:
            depths = await self._unless_dead(self._engine.engine_core.call_utility_async(UTILITY, request.depth))
        except (EngineError, EngineDeadError):
            raise
        except Exception as error:  # vLLM answers a utility that raised with a bare Exception
            raise _BadRequest(str(error)) from error
        return DepthTable(depths=depths)

    async def digest(self) -> Digest:
        answers = await self._rpc("paceline_digest")
        return Digest(
            target="+".join(answer["target"] for answer in answers),
            draft="+".join(answer["draft"] for answer in answers),
        )

    async def _rpc(self, method: str, *args: Any) -> list[dict[str, Any]]:
        answers = await self._ask(method, *args)
        _raise_refusals(answers)
        return answers

    async def _ask(self, method: str, *args: Any) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = await self._unless_dead(self._engine.collective_rpc(method, args=args))
        return answers

    async def _unless_dead(self, question: Awaitable[Reply]) -> Reply:
        """The engine core's answer; raises EngineError once the core is dead.

        vLLM leaves what a core was asked before it died unanswered for ever, and its server waits for that before it ends.
        """
        asked = asyncio.ensure_future(question)
        try:
            while not (await asyncio.wait({asked}, timeout=_DEATH_POLL_S))[0]:
                if self._engine.errored:
                    raise EngineError("the engine core died before it answered; the engine ends and is started again")
            return asked.result()
        finally:
            asked.cancel()


def _whole_layout(ranks: list[KvLayout]) -> KvLayout:
    """Ranks differ in nothing but share the bytes of a token among them."""
    return msgspec.structs.replace(ranks[0], bytes_per_token=sum(rank.bytes_per_token for rank in ranks))


def _raise_refusals(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        if "error" in answer:
            raise _ERROR_BY_CODE.get(answer["error"]["code"], SwapError)(answer["error"]["message"])


def _control(request: Request) -> EngineControl:
    control: EngineControl = request.app.state.paceline
    return control


async def _body(request: Request, kind: type[Body]) -> Body:
    try:
        return msgspec.json.decode(await request.body(), type=kind)
    except msgspec.DecodeError as error:
        raise _BadRequest(f"not a valid {kind.__name__}: {error}") from error


class _BadRequest(PacelineError):
    code = "bad_request"


def _guarded(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """The route with its token check and its errors as OpenAI-shaped JSON."""

    async def route(request: Request) -> Response:
        offered = request.headers.get("authorization", "").encode()
        if not hmac.compare_digest(offered, f"Bearer {request.app.state.paceline_token}".encode()):
            return _error(401, "unauthorized", "this route needs the engine token as `Authorization: Bearer …`")
        try:
            return Response(msgspec.json.encode(await handler(request)), media_type="application/json")
        except _BadRequest as error:
            return _error(400, error.code, str(error))
        except PacelineError as error:
            return _error(_STATUS_BY_CODE.get(error.code, 500), error.code, str(error))

    route.__name__ = handler.__name__
    return route


def _error(status: int, code: str, message: str) -> Response:
    body = {"error": {"message": message, "type": "paceline_error", "code": code}}
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json")
