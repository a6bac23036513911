"""A run against a small server of the test's own, and what it left on disk."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from loadtest.client import new_session
from loadtest.records import RequestRecord, RunRecord, SystemSample
from loadtest.run.conduct import Provenance, conduct
from loadtest.run.output import Output
from loadtest.run.target import Admin, Target
from loadtest.scenario import Scenario
from loadtest.schedule import plan
from loadtest.traffic import Prompt


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """As if the disk were full behind that many bytes of each file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


PROMPTS = tuple(Prompt(f"p{index}", ({"role": "user", "content": f"question {index}"},)) for index in range(50))
ERROR = {"message": "the engine failed", "type": "server_error", "param": None, "code": "engine_failed"}

Script = Callable[[dict[str, Any], Callable[[Any], Awaitable[None]]], Awaitable[None]]
"""Answers one request: gets its body, and what sends an event (an object, or a text as it is)."""


async def good_answer(_body: dict[str, Any], send: Callable[[Any], Awaitable[None]]) -> None:
    await send({"choices": [{"delta": {"content": "yes"}, "finish_reason": "stop"}]})
    await send({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6}})
    await send("[DONE]")


@dataclass
class Server:
    """Answers chats by its script. Public attributes may be changed at any time."""

    script: Script = good_answer
    metrics: str | None = None
    asked: list[dict[str, Any]] = field(default_factory=list)
    """Bodies in the order of arrival, with `headers`."""
    num_running: int = 0
    most_running: int = 0
    num_pages: int = 0
    """Times its metrics were read."""

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append({**body, "headers": dict(request.headers)})
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        response = web.StreamResponse(headers={"X-Paceline-Kv-Path": "combined"})

        async def send(event: Any) -> None:
            if not response.prepared:
                await response.prepare(request)
            await response.write(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode())

        try:
            await self.script(body, send)
            return response if response.prepared else web.json_response({"error": ERROR}, status=503)
        finally:
            self.num_running -= 1

    async def page(self, _request: web.Request) -> web.Response:
        self.num_pages += 1
        return web.Response(status=404) if self.metrics is None else web.Response(text=self.metrics)


@asynccontextmanager
async def serving(server: Server, *routes: web.RouteDef) -> AsyncIterator[str]:
    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", server.chat), web.get("/metrics", server.page), *routes])
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def phase(arrivals: dict[str, Any], duration_s: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"name": "p", "duration_s": duration_s, "arrivals": arrivals, "traffic": {"a": 1}, **more}


def scenario(*lanes: dict[str, Any], **more: Any) -> Scenario:
    """Of lanes without names; a busy machine does not make it invalid."""
    named = [{"name": f"lane-{index}", **lane} for index, lane in enumerate(lanes)]
    limits = {"max_dispatch_lag_p99_ms": 5000.0, "max_busy_share": 100.0}
    return Scenario.build({"name": "s", "what": "w", "lane": named, **limits, **more}, source="test")


@dataclass
class Left:
    """What a run left."""

    run: RunRecord
    requests: list[RequestRecord]
    samples: list[SystemSample]


def run(
    one: Scenario,
    server: Server,
    directory: Path,
    *routes: web.RouteDef,
    beside: Callable[[], Awaitable[None]] | None = None,
    system_file: Path | None = None,
) -> Left:
    """Run it; `routes` are the admin API's, `beside` happens meanwhile."""

    async def whole() -> RunRecord:
        async with serving(server, *routes) as url, new_session(4) as session:
            admin = Admin(session, url, "operator") if routes else None
            target = Target(url=url, model="m", admin=admin, system_file=system_file)
            output = Output(directory, one)
            other = asyncio.create_task(beside()) if beside else None
            try:
                plans = plan(one, lambda *_: len(PROMPTS))
                prompts = {("a", "train"): PROMPTS, ("a", "heldout"): PROMPTS}
                return await conduct(one, plans, prompts, target, output, Provenance(None, {}, {}))
            finally:
                output.close()
                if other is not None:
                    await other

    record = asyncio.run(whole())
    assert msgspec.json.decode((directory / "run.json").read_bytes(), type=RunRecord) == record
    return Left(record, lines(directory / "requests.jsonl", RequestRecord), lines(directory / "timeline.jsonl", SystemSample))


def lines(path: Path, kind: Any) -> list[Any]:
    return [msgspec.json.decode(line, type=kind) for line in path.read_bytes().splitlines()]
