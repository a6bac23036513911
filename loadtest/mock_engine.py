"""A stand-in for an engine, as a process: it speaks an engine's whole protocol and computes nothing.

What a gateway costs shows only in front of an engine that costs nothing itself.

Run: python -m loadtest.mock_engine --id engine-0 --port 8100 --events-endpoint tcp://127.0.0.1:8101
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from aiohttp import web

from loadtest.kv_events import KvEvents
from loadtest.recital import MODEL, Alphabet, Answer
from loadtest.stand_in import NUM_SPECULATIVE_TOKENS, EngineStandIn, json_response
from wire.control import KvLayout
from wire.messages import TOPIC_STATS, AcceptanceCount, encode
from wire.spec import CaptureSpec

_STATS_EVERY_S = 1.0
_BYTES_PER_TOKEN = 4
"""Of a request's body, whose prompt is not read: as many KV blocks as it would fill in English."""
SPEC = CaptureSpec(
    target_id=MODEL,
    target_revision="0" * 16,
    tokenizer_sha256="none",
    dtype="float32",
    hidden_size=8,
    vocab_size=1 << 20,
    draft_vocab_size=16,
    aux_layer_ids=(1, 2, 3),
)
_KV = KvLayout(block_size_tokens=32, bytes_per_token=1024, num_blocks=4096, max_model_len=8192, transfer="none")


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How long the mock makes a client wait, seconds."""

    first_token_s: float
    between_tokens_s: float


class MockEngine(EngineStandIn):
    """One engine that says the alphabet."""

    def __init__(self, engine_id: str, pace: Pace, alphabet: Alphabet, kv_events: KvEvents | None = None) -> None:
        """`kv_events` tells a gateway of KV; None where there is none to tell."""
        super().__init__(engine_id, SPEC, draft_version=0)
        self.pace = pace
        self.kv_events = kv_events
        self._alphabet = alphabet
        self._num_steps: Counter[tuple[int, str, str]] = Counter()

    def layout(self) -> KvLayout:
        return _KV

    async def on_metrics(self, request: web.Request) -> web.Response:
        labels = f'{{engine="0",model_name="{MODEL}"}}'
        lines = (
            "# TYPE vllm:num_requests_running gauge",
            f"vllm:num_requests_running{labels} {self.num_running}",
            "# TYPE vllm:num_requests_waiting gauge",
            f"vllm:num_requests_waiting{labels} 0",
            "# TYPE vllm:kv_cache_usage_perc gauge",
            f"vllm:kv_cache_usage_perc{labels} 0",
        )
        return web.Response(text="\n".join(lines) + "\n")

    async def on_models(self, request: web.Request) -> web.Response:
        return json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def on_completion(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        fields: dict[str, Any] = msgspec.json.decode(body)
        if fields.get("model", MODEL) != MODEL:
            message = f"The model `{fields['model']}` does not exist."
            return json_response(
                {"error": {"message": message, "type": "NotFoundError", "param": "model", "code": 404}}, status=404
            )
        answer = Answer(fields, self._alphabet, is_chat=request.path.endswith("/chat/completions"))
        self.num_running += 1
        try:
            if self.kv_events is not None:
                await self.kv_events.store(len(body) // _BYTES_PER_TOKEN + answer.num_tokens)
            self._verify(fields.get("vllm_xargs") or {}, answer.num_tokens)
            if fields.get("stream"):
                return await self._stream(request, answer)
            await asyncio.sleep(self.pace.first_token_s + self.pace.between_tokens_s * (answer.num_tokens - 1))
            return json_response(answer.whole())
        finally:
            self.num_running -= 1

    def _verify(self, labels: Mapping[str, Any], num_tokens: int) -> None:
        """Count an answer as if one proposal in each verify step had been accepted: an AL of 2, by the gateway's labels."""
        tenant, domain = (str(labels.get(f"paceline_{name}") or "default") for name in ("tenant", "domain"))
        self._num_steps[self.draft_version, tenant, domain] += -(-num_tokens // 2)
        nothing = [0] * (NUM_SPECULATIVE_TOKENS - 1)
        self.acceptance = [
            AcceptanceCount(
                draft_version=version,
                tenant=tenant,
                domain=domain,
                num_verify_steps=number,
                proposed_per_position=[number] * NUM_SPECULATIVE_TOKENS,
                accepted_per_position=[number, *nothing],
            )
            for (version, tenant, domain), number in self._num_steps.items()
        ]

    async def _stream(self, request: web.Request, answer: Answer) -> web.StreamResponse:
        due_s = time.monotonic() + self.pace.first_token_s
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        # Due times are absolute, so that a busy machine does not slow the model down.
        for index in range(answer.num_tokens):
            await asyncio.sleep(max(due_s - time.monotonic(), 0.0))
            await response.write((answer.opening() if index == 0 else b"") + answer.chunk(index))
            due_s += self.pace.between_tokens_s
        await response.write(answer.ending())
        await response.write_eof()
        return response


async def publish_stats(engine: MockEngine, endpoint: str) -> None:
    """Tell the counters once a second, as long as the engine runs."""
    with zmq.asyncio.Context() as context, context.socket(zmq.PUB) as publisher:
        publisher.linger = 0
        publisher.bind(endpoint)
        while True:
            await publisher.send_multipart([TOPIC_STATS, encode(engine.stats())])
            await asyncio.sleep(_STATS_EVERY_S)


@asynccontextmanager
async def serving(engine: MockEngine, port: int, events_endpoint: str) -> AsyncIterator[str]:
    """Listen on loopback while the block runs; yields the engine's URL."""
    runner = web.AppRunner(engine.app(), handler_cancellation=True, shutdown_timeout=1.0, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    publishing = [asyncio.create_task(publish_stats(engine, events_endpoint))]
    if engine.kv_events is not None:
        publishing.append(asyncio.create_task(engine.kv_events.publish()))
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        for task in publishing:
            task.cancel()
        await asyncio.gather(*publishing, return_exceptions=True)
        await runner.cleanup()


async def run(options: argparse.Namespace) -> None:
    """Serve until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    pace = Pace(first_token_s=options.first_token_s, between_tokens_s=options.between_tokens_s)
    kv_events = None
    if options.kv_events_endpoint:
        block_size_tokens = _KV.block_size_tokens
        kv_events = KvEvents(
            options.id, options.kv_events_endpoint, num_blocks=options.kv_blocks, block_size_tokens=block_size_tokens
        )
    engine = MockEngine(options.id, pace, Alphabet(options.target_dir), kv_events)
    async with serving(engine, options.port, options.events_endpoint):
        await stop.wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m loadtest.mock_engine", description="An engine that says the alphabet.")
    parser.add_argument("--id", required=True, help="the engine id it answers to")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--events-endpoint", required=True, help="ZMQ address its stats are published at")
    parser.add_argument("--target-dir", type=Path, help="whose tokenizer.json gives the letters their ids")
    parser.add_argument(
        "--kv-events-endpoint", default="", help="ZMQ address a gateway takes KV events at (default: none is told)"
    )
    parser.add_argument("--kv-blocks", type=int, default=0, help="KV blocks it holds from the start (default 0)")
    parser.add_argument("--first-token-s", type=float, default=0.05, help="seconds to the first token (default 0.05)")
    parser.add_argument("--between-tokens-s", type=float, default=0.05, help="seconds between tokens (default 0.05)")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
