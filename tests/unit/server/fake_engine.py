"""FakeEngine: an engine on real sockets that computes nothing, and misbehaves on request.

It checks artifacts with the real store, so that what a real engine refuses by checksum is refused here too.
"""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from aiohttp import web
from fake_model import FakeModel

from loadtest.stand_in import MAX_REQUESTS, NUM_SPECULATIVE_TOKENS, EngineStandIn
from server.config import EngineEndpoint, PoolKind
from wire.artifact import WEIGHTS_FILE
from wire.control import AnswerLimits, EngineStatus, KvLayout
from wire.errors import ArtifactError
from wire.messages import TOPIC_STATS, encode
from wire.spec import SCHEMA_VERSION, CaptureSpec
from wire.store import DraftStore
from wire.target import TargetStore

TOKEN = "engine-token"
DEATH = (
    b'data: {"error":{"message":"EngineCore encountered an issue.","type":"InternalServerError","param":null,"code":500}}\n\n'
)
"""How vLLM's server reports the death of its core; `[DONE]` follows."""
MAX_MODEL_LEN = 512
VLLM_METRICS = """\
# HELP vllm:num_requests_running Requests running.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="fake"} 2.0
# HELP vllm:generation_tokens_total Tokens.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="fake"} 41.0
# HELP paceline_kv_store_blocks_total Blocks.
# TYPE paceline_kv_store_blocks_total counter
paceline_kv_store_blocks_total{event="loaded"} 7.0
# HELP process_open_fds Open files.
# TYPE process_open_fds gauge
process_open_fds 9.0
"""


def events(num: int, *, done: bool = True) -> list[bytes]:
    """A stream of `num` token events."""
    chunks = [b'data: {"id":"cmpl-1","choices":[{"index":0,"text":"t%d \xc3\xa9"}]}\n\n' % index for index in range(num)]
    return [*chunks, b"data: [DONE]\n\n"] if done else chunks


class FakeEngine(EngineStandIn):
    """One engine. Public attributes are switches; change them at any time."""

    def __init__(self, engine_id: str, spec: CaptureSpec, state_dir: Path, *, draft_version: int) -> None:
        super().__init__(engine_id, spec, draft_version=draft_version)
        self.kind: PoolKind = "combined"
        self.store = DraftStore(state_dir)
        self.schema_version = SCHEMA_VERSION
        self.status_id = engine_id
        self.answer_limits = AnswerLimits()
        self.calls: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self.chunks = events(3)
        self.chunk_gate: asyncio.Event | None = None
        """Where set, the stream waits for it after its first chunk."""
        self.die_after_chunks: int | None = None
        self.deaths: list[tuple[str, int]] = []
        """One for each next stream, and what shares the list shares them: how, and after how many chunks.

        `break`: the connection does. `report`: the core died. `abort`: the engine was told to stop.
        """
        self.model: FakeModel | None = None
        """Where set, it makes the chunks."""
        self.first_gate: asyncio.Event | None = None
        """Where set, a model request waits for it before anything else."""
        self.peers: dict[str, FakeEngine] = {}
        """Engines whose KV it can pull."""
        self.leases: set[str] = set()
        """KV it holds for others."""
        self.num_leases = 0
        """Ever given."""
        self.num_pulled = 0
        self.offers_kv = True
        self.drop_connections = False
        """Close the connection of a model request without an answer."""
        self.answer: tuple[int, dict[str, Any]] | None = None
        """A fixed answer to model requests."""
        self.refuse_stage: dict[int, str] = {}
        self.refuse_commit: dict[int, str] = {}
        self.hang_commit = False
        self.targets = TargetStore(state_dir)
        self.refuse_target_stage: dict[int, str] = {}
        self.refuse_target_commit: dict[int, str] = {}
        self.fails_to_go_back = False
        self.hang_target_commit = False
        self.target_gate: asyncio.Event | None = None
        """Where set, a commit of a target waits for it, everything else goes on."""
        self.scores: dict[int, tuple[float, ...]] = {}
        """What it says of a canary, by the target it computes with; the manifest's own numbers where nothing is said."""
        self.scored_bodies: list[dict[str, Any]] = []
        self.read_sha256: dict[int, str] = {}
        """Checksums of the weights it took, where they are not the artifact's."""
        self.refuses_depth = False
        self.stage_gate: asyncio.Event | None = None
        self.health_gate: asyncio.Event | None = None
        self.core_gate: asyncio.Event | None = None
        """Where set, the core hangs until it is set, while the health route goes on answering."""
        self.num_aborted = 0
        self.metrics_text = VLLM_METRICS
        self.num_scrapes = 0
        """Times its metrics were read."""
        self._runner: web.AppRunner | None = None
        self._port = 0
        self._context = zmq.asyncio.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._publisher.linger = 0
        self._events_port = self._publisher.bind_to_random_port("tcp://127.0.0.1")

    @property
    def endpoint(self) -> EngineEndpoint:
        return EngineEndpoint(
            id=self.id,
            kind=self.kind,
            url=f"http://127.0.0.1:{self._port}",
            events_endpoint=f"tcp://127.0.0.1:{self._events_port}",
        )

    async def start(self) -> None:
        """Listen; on the same port as before where it was stopped."""
        self._runner = web.AppRunner(self.app(), handler_cancellation=True, shutdown_timeout=0.05)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Die: the port refuses connections, streams break."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def restart(self, *, draft_version: int) -> None:
        """Come back as a new process with zeroed counters."""
        await self.stop()
        self.epoch = uuid.uuid4().hex
        self.draft_version = draft_version
        self.staged.clear()
        self.staged_targets.clear()
        self.target_version = 0
        self.acceptance = []
        self.step_times = []
        self.depths = [NUM_SPECULATIVE_TOKENS] * MAX_REQUESTS
        await self.start()

    async def close(self) -> None:
        await self.stop()
        self._context.destroy(linger=0)

    async def publish_stats(self) -> None:
        await self._publisher.send_multipart([TOPIC_STATS, encode(self.stats())])

    async def publish_garbage(self) -> None:
        await self._publisher.send_multipart([TOPIC_STATS, b"\x00garbage"])

    def status(self) -> EngineStatus:
        return msgspec.structs.replace(
            super().status(),
            schema_version=self.schema_version,
            engine_id=self.status_id,
            answer_limits=self.answer_limits,
        )

    def layout(self) -> KvLayout:
        transfer = {"combined": "none", "prefill": "kv_producer", "decode": "kv_consumer"}[self.kind]
        return KvLayout(
            block_size_tokens=16, bytes_per_token=1024, num_blocks=64, max_model_len=MAX_MODEL_LEN, transfer=transfer
        )

    async def on_health(self, request: web.Request) -> web.Response:
        if self.health_gate is not None:
            await self.health_gate.wait()
        return await super().on_health(request)

    async def on_metrics(self, request: web.Request) -> web.Response:
        self.num_scrapes += 1
        return web.Response(text=self.metrics_text)

    async def on_models(self, request: web.Request) -> web.Response:
        self.headers.append(request.headers)
        return web.json_response({"object": "list", "data": [{"id": "fake"}]})

    async def on_completion(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        if "prompt_logprobs" in body:
            return self._score(body)
        self.headers.append(request.headers)
        self.bodies.append(body)
        if self.drop_connections:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if self.answer is not None:
            # As vLLM writes it: without spaces.
            text = json.dumps(self.answer[1], separators=(",", ":"))
            return web.json_response(text=text, status=self.answer[0])
        if body.get("stream_options") and not body.get("stream"):
            # Refused with the body, before anything looks at the KV it names.
            return _error(400, "Stream options can only be defined when `stream=True`.", "400")
        params = body.get("kv_transfer_params") or {}
        if body.get("model") not in (None, "fake"):
            self._pull(params)
            return _error(404, "The model does not exist.", "404")
        self.num_running += 1
        try:
            if self.first_gate is not None:
                await self.first_gate.wait()
            if params.get("do_remote_decode"):
                return self._prefill()
            if params:
                self.num_pulled += 1
                self._pull(params)
            if not body.get("stream"):
                if self.chunk_gate is not None:
                    await self.chunk_gate.wait()
                return web.json_response({"id": "cmpl-1", "choices": [{"text": "whole"}]})
            if self.model is not None:
                self.chunks = self.model.chunks(request.path, body, request.headers["X-Request-Id"])
            return await self._stream(request)
        except (asyncio.CancelledError, ConnectionError):
            self.num_aborted += 1
            raise
        finally:
            self.num_running -= 1

    def _prefill(self) -> web.Response:
        params = None
        if self.offers_kv:
            lease = uuid.uuid4().hex
            self.leases.add(lease)
            self.num_leases += 1
            params = {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2]]}
            params |= {"remote_engine_id": self.id, "remote_request_id": lease, "remote_host": "h", "remote_port": 1}
        return web.json_response({"id": "cmpl-1", "choices": [{"text": "x"}], "kv_transfer_params": params})

    def _pull(self, params: dict[str, Any]) -> None:
        """Read the blocks, or only tell their holder that nobody will."""
        if params.get("do_remote_prefill"):
            self.peers[params["remote_engine_id"]].leases.discard(params["remote_request_id"])

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        how, death = self.deaths.pop(0) if self.deaths else ("break", self.die_after_chunks)
        for index, chunk in enumerate(self.chunks):
            if index == death and how == "break":
                assert request.transport is not None
                request.transport.abort()
                return response
            if index == death and how == "abort":
                await response.write(_aborted(chunk) + b"data: [DONE]\n\n")
                break
            if index == death:
                await response.write(DEATH + b"data: [DONE]\n\n")
                break
            await response.write(chunk)
            if self.chunk_gate is not None:
                await self.chunk_gate.wait()
            else:
                await asyncio.sleep(0)
        await response.write_eof()
        return response

    async def on_status(self, request: web.Request) -> web.Response:
        self._note(request, "status")
        if self.core_gate is not None:
            await self.core_gate.wait()
        return await super().on_status(request)

    async def on_stage(self, request: web.Request) -> web.Response:
        version = (await request.json())["version"]
        self._note(request, f"stage {version}")
        if self.stage_gate is not None:
            await self.stage_gate.wait()
        if version in self.refuse_stage:
            return _error(422, self.refuse_stage[version], "bad_artifact")
        try:
            self.store.verify(version)
        except ArtifactError as error:
            return _error(422, str(error), error.code)
        return await super().on_stage(request)

    async def on_commit(self, request: web.Request) -> web.Response:
        body = await request.json()
        version, expected = body["version"], body["expected_active"]
        self._note(request, f"commit {version}")
        if self.hang_commit:
            await asyncio.sleep(60)
        if version in self.refuse_commit:
            return _error(500, self.refuse_commit[version], "engine_error")
        if expected != self.draft_version:
            return _error(409, f"active is {self.draft_version}, expected {expected}", "stale_expected_active")
        if version not in self.staged:
            return _error(404, f"draft {version} is not staged", "not_staged")
        return await super().on_commit(request)

    async def on_stage_target(self, request: web.Request) -> web.Response:
        version = (await request.json())["version"]
        self._note(request, f"stage target {version}")
        if version in self.refuse_target_stage:
            return _error(422, self.refuse_target_stage[version], "bad_artifact")
        try:
            if version:
                self.targets.verify(version)
        except ArtifactError as error:
            return _error(422, str(error), error.code)
        return await super().on_stage_target(request)

    async def on_commit_target(self, request: web.Request) -> web.Response:
        """As an engine: not while KV is held for another one, whose blocks could not be dropped."""
        body = await request.json()
        version, expected, deadline_s = body["version"], body["expected_active"], body["deadline_s"]
        self._note(request, f"commit target {version}")
        if self.hang_target_commit:
            await asyncio.sleep(60)
        if self.target_gate is not None:
            await self.target_gate.wait()
        if version in self.refuse_target_commit:
            return _error(409, self.refuse_target_commit[version], "target_refused")
        if self.fails_to_go_back and version < self.target_version:
            return _error(500, "the engine core died", "engine_error")
        if expected != self.target_version:
            return _error(409, f"active is {self.target_version}, expected {expected}", "stale_expected_active")
        if version not in self.staged_targets:
            return _error(409, f"target {version} is not staged", "swap_refused")
        try:
            async with asyncio.timeout(deadline_s):
                while self.leases:
                    await asyncio.sleep(0.01)
        except TimeoutError:
            return _error(409, "its KV could not be dropped", "target_refused")
        return await super().on_commit_target(request)

    def weights_sha256(self, version: int) -> str:
        artifact = self.targets.manifest(version).sha256[WEIGHTS_FILE] if version else ""
        return self.read_sha256.get(version, artifact)

    def _score(self, body: dict[str, Any]) -> web.Response:
        self.scored_bodies.append(body)
        version = self.target_version
        logprobs = self.scores.get(version, self.targets.manifest(version).canary.logprobs if version else ())
        entries = [{str(token): {"logprob": value}} for token, value in zip(body["prompt"][1:], logprobs, strict=False)]
        return web.json_response({"choices": [{"text": "", "prompt_logprobs": [None, *entries]}]})

    async def on_capture(self, request: web.Request) -> web.Response:
        self._note(request, "capture")
        return await super().on_capture(request)

    async def on_depth(self, request: web.Request) -> web.Response:
        self._note(request, "depth")
        if self.refuses_depth:
            return _error(500, "not now", "engine_error")
        return await super().on_depth(request)

    def _note(self, request: web.Request, call: str) -> None:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise web.HTTPUnauthorized(text=json.dumps({"error": {"message": "bad token", "code": "unauthorized"}}))
        self.calls.append(call)


def _aborted(chunk: bytes) -> bytes:
    return re.sub(rb'"finish_reason":(null|"stop")', b'"finish_reason":"abort"', chunk)


def _error(status: int, message: str, code: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "error", "code": code}}, status=status)
