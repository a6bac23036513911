"""TinySystem: a system as a measurement sees it, small enough for a unit test.

Real processes that do nothing stand for the roles, a task starts them anew when they are killed, and one server answers for
the gateway and its admin port. Switches make it fail in the ways the bars must notice.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from loadtest.system import ONE_ENGINE, Pool, System
from wire.control import (
    AdminStatus,
    CanaryView,
    CaptureView,
    DrainView,
    EngineView,
    LearnerView,
    TrafficView,
)
from wire.spec import SCHEMA_VERSION

NUM_TOKENS = 6
ERROR = {"message": "the engine failed", "type": "server_error", "param": None, "code": "engine_failed"}


class TinySystem:
    """Public attributes are switches; change them at any time."""

    def __init__(self, state_dir: Path, pools: Sequence[Pool]) -> None:
        self.state_dir = state_dir
        self.pools = list(pools)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.num_starts: dict[str, int] = {}
        self.draining: set[str] = set()
        self.token_delay_s = 0.01
        """Of every eighth request; the others are up to twice as slow, so that streams do not run in step."""
        self.num_requests = 0
        self.awaits_refusal = False
        """A decode engine that has ended is started anew only once a request was refused without it."""
        self.num_refused = 0
        self.is_resuming = True
        """Requests outlive the only decode engine. Else those in flight end with `stream_end` and new ones are refused."""
        self.uses_prefill_pool = True
        self.stream_end: list[dict[str, Any] | str] = [{"error": ERROR}]
        self.refusal: object = {"error": ERROR}
        self.breaks_when_restarted = False
        """Every engine's end costs one request its answer, drained or not."""
        self.wrong_after_starts = 10**9
        """From that many starts of processes on, answers differ."""
        self.num_leaked = 0
        """Counted as in flight for ever, per request a client left."""
        self.leaks_on_disconnect = False
        self.num_disconnects = 0
        self.prefilled = {pool.id: 0 for pool in pools}
        self.extra_metrics = ""

    def start(self, name: str) -> None:
        """A process of its own group, as the supervisor starts them."""
        self.processes[name] = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        self.num_starts[name] = self.num_starts.get(name, 0) + 1

    @property
    def names(self) -> list[str]:
        return [*(pool.id for pool in self.pools), "learner", "gateway"]

    @property
    def num_restarts(self) -> int:
        return sum(self.num_starts.values()) - len(self.names)

    def is_up(self, name: str) -> bool:
        return self.processes[name].poll() is None

    @property
    def decoders(self) -> list[str]:
        return [pool.id for pool in self.pools if pool.kind != "prefill"]

    def are_decoders_up(self) -> bool:
        return all(map(self.is_up, self.decoders))

    async def supervise(self) -> None:
        """Start again what ended, a moment later."""
        while True:
            self.write()
            await asyncio.sleep(0.05)
            for name in self.names:
                if not self.is_up(name):
                    self.write()
                    num_refused = self.num_refused
                    await asyncio.sleep(0.05)
                    while self.awaits_refusal and not self.are_decoders_up() and self.num_refused == num_refused:
                        await asyncio.sleep(0.01)
                    self.start(name)

    def write(self) -> None:
        """`system.json` and the token, as `up` leaves them."""
        run = self.state_dir / "run"
        run.mkdir(parents=True, exist_ok=True)
        (run / "operator.token").write_text("operator")
        (run / "gateway.json").write_text("{}")
        pids = {name: {"pid": self.processes[name].pid if self.is_up(name) else None} for name in self.names}
        temporary = run / "system.tmp"
        temporary.write_text(json.dumps({"processes": pids}))
        temporary.rename(run / "system.json")

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.get("/metrics", self._metrics),
                web.get("/admin/status", self._status),
                web.post("/admin/engines/{id}/drain", self._drain),
                web.post("/admin/engines/{id}/undrain", self._undrain),
            ]
        )
        return app

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not self.is_up("gateway"):
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if not self.is_resuming and not self.are_decoders_up():
            self.num_refused += 1
            return web.json_response(self.refusal, status=503)
        starts = dict(self.num_starts)
        try:
            if not body.get("stream"):
                await asyncio.sleep(self.token_delay_s * NUM_TOKENS)
                return web.json_response({"choices": []})
            return await self._stream(request, starts)
        except (asyncio.CancelledError, ConnectionError):
            self.num_disconnects += 1
            self.num_leaked += self.leaks_on_disconnect
            raise

    async def _stream(self, request: web.Request, starts: dict[str, int]) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        word = "other" if self.num_restarts >= self.wrong_after_starts else "word"
        delay_s = self.token_delay_s * (1 + self.num_requests % 8 / 8)
        self.num_requests += 1
        for _ in range(NUM_TOKENS):
            await asyncio.sleep(delay_s)
            if not self.is_up("gateway"):
                assert request.transport is not None
                request.transport.abort()
                return response
            its_own = self.names if self.breaks_when_restarted else self.decoders
            is_lost = any(self.num_starts[name] != starts[name] or not self.is_up(name) for name in its_own)
            if is_lost and (not self.is_resuming or self.breaks_when_restarted):
                for event in self.stream_end:
                    await self._send(response, event)
                return response
            await self._send(response, {"choices": [{"delta": {"content": word}, "finish_reason": None}]})
        await self._send(response, {"choices": [{"delta": {}, "finish_reason": "length"}]})
        await self._send(response, "[DONE]")
        return response

    async def _send(self, response: web.StreamResponse, event: dict[str, Any] | str) -> None:
        text = event if isinstance(event, str) else json.dumps(event)
        await response.write(f"data: {text}\n\n".encode())

    async def _metrics(self, _request: web.Request) -> web.Response:
        lines = [
            f"paceline_requests_in_flight {self.num_leaked}",
            "paceline_kv_leases_held 0",
            f'paceline_kv_leases_total{{end="released"}} {self.num_disconnects * self.uses_prefill_pool}',
            f'paceline_routed_total{{path="remote_prefill"}} {self.num_requests * self.uses_prefill_pool}',
            self.extra_metrics,
        ]
        for pool in self.pools:
            lines += [
                f'paceline_engine_requests_in_flight{{engine="{pool.id}"}} 0',
                f'vllm:num_requests_running{{engine="{pool.id}"}} 0',
                f'vllm:num_requests_waiting{{engine="{pool.id}"}} 0',
                f'vllm:kv_cache_usage_perc{{engine="{pool.id}"}} 0',
            ]
        return web.Response(text="\n".join(lines))

    async def _status(self, _request: web.Request) -> web.Response:
        if not self.is_up("gateway"):
            raise web.HTTPServiceUnavailable
        engines = [
            EngineView(
                id=pool.id,
                ready=self.is_up(pool.id),
                reason="",
                engine_epoch=str(self.num_starts[pool.id]),
                draft_version=0,
                target_version=0,
                parts=[],
                num_speculative_tokens=3,
                depth=3,
                num_in_flight=0,
                kind=pool.kind,
                is_draining=pool.id in self.draining,
            )
            for pool in self.pools
        ]
        status = AdminStatus(
            schema_version=SCHEMA_VERSION,
            ready=True,
            reason="",
            uptime_s=1.0,
            active_version=0,
            previous_version=None,
            floor_version=0,
            rolled_back_versions=[],
            engines=engines,
            canary=CanaryView(state="idle"),
            swaps=[],
            learner=LearnerView(alive=self.is_up("learner"), paused=False, age_s=None, report=None),
            capture=CaptureView(rate=1.0, num_captured_rows=0, num_dropped_rows={}),
            acceptance=None,
            traffic=TrafficView(
                num_in_flight=0, num_served=0, num_failed=0, num_refused=0, num_disconnected=0, num_verified_tokens=0
            ),
        )
        return web.Response(body=msgspec.json.encode(status), content_type="application/json")

    async def _drain(self, request: web.Request) -> web.Response:
        self.draining.add(request.match_info["id"])
        return self._drained(request)

    async def _undrain(self, request: web.Request) -> web.Response:
        self.draining.discard(request.match_info["id"])
        return self._drained(request)

    def _drained(self, request: web.Request) -> web.Response:
        is_draining = request.match_info["id"] in self.draining
        view = DrainView(
            id=request.match_info["id"],
            is_draining=is_draining,
            is_drained=is_draining,
            num_in_flight=0,
            lease_left_s=0.0,
        )
        return web.Response(body=msgspec.json.encode(view), content_type="application/json")


@asynccontextmanager
async def running(state_dir: Path, pools: Sequence[Pool] = ONE_ENGINE) -> AsyncIterator[tuple[TinySystem, System]]:
    """The tiny system, and a measurement's handle of it."""
    tiny = TinySystem(state_dir, pools)
    runner = web.AppRunner(tiny.app(), handler_cancellation=True, shutdown_timeout=0.1)
    try:
        for name in tiny.names:
            tiny.start(name)
        tiny.write()
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        supervising = asyncio.create_task(tiny.supervise())
        try:
            yield tiny, System(state_dir, {"gateway_url": url, "admin_url": url, "target_dir": "/models/tiny"}, "engine")
        finally:
            supervising.cancel()
            await asyncio.gather(supervising, return_exceptions=True)
            await runner.cleanup()
    finally:
        for process in tiny.processes.values():
            process.kill()
            process.wait()
