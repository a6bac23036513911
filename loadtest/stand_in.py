"""EngineStandIn: what all that stands for an engine has in common: an engine's routes, its state and what it says of itself."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod

import msgspec
from aiohttp import web

from wire.control import (
    CaptureRequest,
    CommitReport,
    CommitRequest,
    DepthRequest,
    DepthTable,
    EngineStatus,
    GenerateAbilities,
    KvLayout,
    StageRequest,
    WorkerStatus,
)
from wire.messages import AcceptanceCount, EngineStats, StepTime
from wire.spec import SCHEMA_VERSION, CaptureSpec
from wire.target_control import TargetCommitReport, TargetCommitRequest

NUM_SPECULATIVE_TOKENS = 3
MAX_REQUESTS = 8
"""It says that it runs at once."""


class EngineStandIn(ABC):
    """An engine of one worker that does what it is told. Public attributes are its state; change them at any time."""

    def __init__(self, engine_id: str, spec: CaptureSpec, *, draft_version: int) -> None:
        self.id = engine_id
        self.spec = spec
        self.epoch = uuid.uuid4().hex
        self.parts = ["capture", "weights"]
        self.draft_version = draft_version
        self.target_version = 0
        self.staged: set[int] = set()
        self.staged_targets: set[int] = set()
        self.abilities: GenerateAbilities | None = None
        """What it was started with for rollouts."""
        self.capture_rate = 1.0
        self.depths = [NUM_SPECULATIVE_TOKENS] * MAX_REQUESTS
        self.step_times: list[StepTime] = []
        self.num_running = 0
        self.acceptance: list[AcceptanceCount] = []
        self.num_captured_rows = 0
        self.num_dropped_rows: dict[str, int] = {}

    def app(self) -> web.Application:
        """All routes of an engine that a gateway or a client calls."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/health", self.on_health),
                web.get("/metrics", self.on_metrics),
                web.get("/v1/models", self.on_models),
                web.post("/v1/chat/completions", self.on_completion),
                web.post("/v1/completions", self.on_completion),
                web.post("/inference/v1/generate", self.on_completion),
                web.get("/paceline/status", self.on_status),
                web.post("/paceline/stage", self.on_stage),
                web.post("/paceline/commit", self.on_commit),
                web.post("/paceline/target/stage", self.on_stage_target),
                web.post("/paceline/target/commit", self.on_commit_target),
                web.post("/paceline/capture", self.on_capture),
                web.post("/paceline/depth", self.on_depth),
            ]
        )
        return app

    @abstractmethod
    def layout(self) -> KvLayout:
        """Of the KV cache it claims to have."""

    def stats(self) -> EngineStats:
        return EngineStats(
            schema_version=SCHEMA_VERSION,
            engine_id=self.id,
            engine_epoch=self.epoch,
            sent_at_s=time.time(),
            draft_version=self.draft_version,
            target_version=self.target_version,
            capture_rate=self.capture_rate,
            acceptance=self.acceptance,
            num_captured_rows=self.num_captured_rows,
            num_dropped_rows=self.num_dropped_rows,
            step_times=self.step_times,
        )

    def status(self) -> EngineStatus:
        worker = WorkerStatus(
            rank=0,
            pid=1,
            runner="v1",
            parts=self.parts,
            draft_version=self.draft_version,
            target_version=self.target_version,
            staged_versions=sorted(self.staged),
            capture_rate=self.capture_rate,
            staged_target_versions=sorted(self.staged_targets),
        )
        return EngineStatus(
            schema_version=SCHEMA_VERSION,
            engine_id=self.id,
            engine_epoch=self.epoch,
            vllm_version="stand-in",
            spec=self.spec,
            num_speculative_tokens=NUM_SPECULATIVE_TOKENS,
            depth=self.depths[0],
            kv=self.layout(),
            workers=[worker],
            depths=self.depths,
            generate=self.abilities,
        )

    @abstractmethod
    async def on_metrics(self, request: web.Request) -> web.Response: ...

    @abstractmethod
    async def on_models(self, request: web.Request) -> web.Response: ...

    @abstractmethod
    async def on_completion(self, request: web.Request) -> web.StreamResponse: ...

    async def on_health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def on_status(self, request: web.Request) -> web.Response:
        return json_response(self.status())

    async def on_stage(self, request: web.Request) -> web.Response:
        stage = msgspec.json.decode(await request.read(), type=StageRequest)
        self.staged.add(stage.version)
        return json_response(stage)

    async def on_commit(self, request: web.Request) -> web.Response:
        version = msgspec.json.decode(await request.read(), type=CommitRequest).version
        previous, self.draft_version = self.draft_version, version
        return json_response(CommitReport(version=version, previous=previous, apply_ms=2.0, rpc_ms=20.0))

    async def on_stage_target(self, request: web.Request) -> web.Response:
        stage = msgspec.json.decode(await request.read(), type=StageRequest)
        self.staged_targets.add(stage.version)
        return json_response(stage)

    async def on_commit_target(self, request: web.Request) -> web.Response:
        version = msgspec.json.decode(await request.read(), type=TargetCommitRequest).version
        previous, self.target_version = self.target_version, version
        report = TargetCommitReport(
            version=version,
            previous=previous,
            weights_sha256=self.weights_sha256(version),
            digest=f"of {version}",
            pause_ms=20.0,
            apply_ms=500.0,
            total_ms=530.0,
        )
        return json_response(report)

    def weights_sha256(self, version: int) -> str:
        """Of the file a version of the target was read from."""
        return ""

    async def on_capture(self, request: web.Request) -> web.Response:
        capture = msgspec.json.decode(await request.read(), type=CaptureRequest)
        self.capture_rate = capture.rate
        return json_response(capture)

    async def on_depth(self, request: web.Request) -> web.Response:
        depth = msgspec.json.decode(await request.read(), type=DepthRequest).depth
        self.depths = [depth] * MAX_REQUESTS if isinstance(depth, int) else depth
        return json_response(DepthTable(depths=self.depths))


def json_response(content: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), status=status, content_type="application/json")
