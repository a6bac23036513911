"""A gateway on a real socket whose tokens tell where they stand and which target made them, and that misbehaves on request.

Token `FIRST + 8 * (place % 7) + version`: whoever joins an answer of pieces wrongly, or names the wrong target, is found out by the
tokens themselves. Events are those of vLLM 0.32's `/inference/v1/generate`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

FIRST = 40
TOKENS_PER_EVENT = 2
GARBAGE: dict[str, Any] = {
    "no json": b"data: {\n\n",
    "a hole in the spans": {"weight_versions": [{"version": "0", "start": 1, "end": 2}]},
    "no spans": {"weight_versions": None},
    "a target without a number": {"weight_versions": [{"version": "default", "start": 0, "end": 1}]},
    "a positive log-probability": {"logprob": 0.5},
    "an impossible log-probability": {"logprob": -9999.0},
    "a log-probability that is no number": b'data: {"choices":[{"token_ids":[41],"logprobs":{"content":[{"logprob":NaN}]}}]}\n\n',
    "fewer log-probabilities than tokens": {"content": []},
    "another token's log-probability": {"token_id": 3},
    "a token that does not exist": {"token_ids": [10**6]},
    "too many tokens": {"repeat": 10_000},
    "a line without end": b"data: " + b"x" * (1 << 20),
}


def token(place: int, version: int) -> int:
    """The token at a place of the whole context."""
    return FIRST + 8 * (place % 7) + version


def logprob(token_id: int) -> float:
    return -token_id / 1000.0


@dataclass
class GenerateStandIn:
    answer_tokens: int = 12
    """An answer of so many since the last line break ends."""
    newline_id: int = 0
    eos_id: int = 0
    fault: Callable[[int], str] = lambda number: ""
    """By the request's number: `cut`, `error`, `hang`, `busy`, `refuse`, `unable`, `stopped` (the engine gives it up) or a kind of GARBAGE."""
    fault_after: int = TOKENS_PER_EVENT
    """Tokens that arrive first."""
    before_token: Callable[[int, int], None] = lambda number, index: None
    """Called before each token, with the request's number and how many it has made."""
    speak: Callable[[int, int, list[int]], int] | None = None
    """By the same two and the context so far, the token itself, where it is to say something else than where it stands."""
    logprob_of: Callable[[list[int]], float] = lambda context: logprob(context[-1])
    """Of the last token of a context."""
    pause_s: float = 0.0
    version: int = 0
    probability_scale: Callable[[float], float] = lambda temperature: 1.0 / temperature
    problem: tuple[int, str] | None = None
    """Status and message of every answer."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    num_open: int = 0
    most_open: int = 0
    url: str = ""

    async def __aenter__(self) -> GenerateStandIn:
        app = web.Application()
        app.router.add_post("/inference/v1/generate", self._generate)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        number = len(self.bodies)
        self.bodies.append(body)
        if self.problem is not None:
            return _error(*self.problem)
        if not body["stream"]:
            return self._whole(body)
        fault = self.fault(number)
        if fault == "busy":
            return _error(503, "no place", {"Retry-After": "0"})
        if fault == "refuse":
            return _error(400, "too long")
        if fault == "unable":
            return _error(501, "its speculation accepts at random")
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            return await self._stream(request, body, number, fault)
        finally:
            self.num_open -= 1

    async def _stream(self, request: web.Request, body: dict[str, Any], number: int, fault: str) -> web.StreamResponse:
        headers = {"X-Paceline-Target-Version": str(self.version), "X-Paceline-Draft-Version": "4"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        context, versions = list(body["token_ids"]), list[int]()
        max_tokens, reason = body["sampling_params"]["max_tokens"], ""
        while not reason:
            made: list[int] = []
            logprobs: list[float] = []
            while len(made) < TOKENS_PER_EVENT and not reason:
                self.before_token(number, len(versions))
                made.append(self._next(context) if self.speak is None else self.speak(number, len(versions), context))
                context.append(made[-1])
                logprobs.append(self.logprob_of(context))
                versions.append(self.version)
                if made[-1] == self.eos_id:
                    reason = "stop"
                elif len(versions) == max_tokens:
                    reason = "length"
            if len(versions) > self.fault_after and fault:
                return await self._misbehave(request, response, fault)
            await response.write(_event(made, logprobs, reason or None, spans(versions) if reason else None))
            await asyncio.sleep(self.pause_s)
        await response.write(b'data: {"request_id":"r","choices":[],"usage":{"completion_tokens":1}}\n\ndata: [DONE]\n\n')
        return response

    def _next(self, context: list[int]) -> int:
        since = len(context) - 1 - max((i for i, t in enumerate(context) if t == self.newline_id), default=0)
        return self.eos_id if since >= self.answer_tokens else token(len(context), self.version)

    async def _misbehave(self, request: web.Request, response: web.StreamResponse, fault: str) -> web.StreamResponse:
        match fault:
            case "cut":
                await asyncio.sleep(0.01)
                assert request.transport is not None
                request.transport.abort()
            case "error":
                await response.write(b'data: {"error":{"message":"the engine failed while generating","code":502}}\n\n')
            case "hang":
                await asyncio.sleep(3600)
            case "stopped":
                await response.write(_event([], [], "abort", spans([self.version] * TOKENS_PER_EVENT)))
            case _:
                await response.write(_garbage(GARBAGE[fault]))
        return response

    def _whole(self, body: dict[str, Any]) -> web.Response:
        """One token at a distribution of four, for the probe."""
        scale = self.probability_scale(body["sampling_params"]["temperature"])
        top = [{"token_id": token_id, "logprob": -0.1 - scale * token_id} for token_id in range(4)]
        choice = {
            "index": 0,
            "finish_reason": "length",
            "token_ids": [1],
            "weight_versions": [{"version": str(self.version), "start": 0, "end": 1}],
            "logprobs": {"content": [top[1] | {"top_logprobs": top}]},
        }
        return web.json_response({"choices": [choice]})


def spans(versions: list[int]) -> list[dict[str, Any]]:
    """As vLLM writes them: one for each stretch of a version."""
    found: list[dict[str, Any]] = []
    for place, version in enumerate(versions):
        if not found or found[-1]["version"] != str(version):
            found.append({"version": str(version), "start": place, "end": place})
        found[-1]["end"] = place + 1
    return found


def _event(token_ids: list[int], logprobs: list[float], reason: str | None, versions: list[dict[str, Any]] | None) -> bytes:
    content = [{"token_id": token_id, "logprob": value, "rank": 1} for token_id, value in zip(token_ids, logprobs, strict=True)]
    choice = {
        "index": 0,
        "token_ids": token_ids,
        "logprobs": {"content": content},
        "finish_reason": reason,
        "weight_versions": versions,
    }
    return b"data: " + json.dumps({"request_id": "r", "usage": None, "choices": [choice]}).encode() + b"\n\n"


def _garbage(what: Any) -> bytes:
    """An event that ends the answer and is wrong in one point."""
    if isinstance(what, bytes):
        return what
    token_ids = what.get("token_ids", [FIRST]) * what.get("repeat", 1)
    content = [{"token_id": what.get("token_id", token_id), "logprob": what.get("logprob", -0.5)} for token_id in token_ids]
    choice = {
        "index": 0,
        "token_ids": token_ids,
        "logprobs": {"content": what.get("content", content)},
        "finish_reason": "stop",
        "weight_versions": what.get("weight_versions", spans([0] * (TOKENS_PER_EVENT + len(token_ids)))),
    }
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response({"error": {"message": message, "code": "x"}}, status=status, headers=headers)
