"""EngineClient: the private HTTP routes of one engine, typed.

This module owns the connection pool and the token. It does not know which engine is ready or which draft should be active.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import aiohttp
import msgspec

from server.config import EngineEndpoint
from server.errors import EngineRefused
from server.paths import COMPLETIONS_PATH
from wire.control import (
    CaptureRequest,
    CommitReport,
    CommitRequest,
    DepthRequest,
    DepthTable,
    EngineStatus,
    StageRequest,
)
from wire.errors import EngineError
from wire.target_control import TargetCommitReport, TargetCommitRequest

CONNECT_TIMEOUT_S = 2.0
CONTROL_TIMEOUT_S = 30.0
"""A control call waits for the step in flight, and a full prefill step takes about 10 s on a small CPU."""
KEEPALIVE_S = 3.0
"""Shorter than uvicorn's 5 s, so the gateway, not the engine, closes an idle connection; else a request could meet the close."""
MAX_ERROR_CHARS = 500
UNREACHED = "does not accept connections; it may be starting"
"""Said of an engine to clients: aiohttp's own words name the private address."""

Answer = TypeVar("Answer")


class _Staged(msgspec.Struct):
    version: int


class _Question(msgspec.Struct):
    """To `/v1/completions`; vLLM always answers `prompt_logprobs` from the plain distribution and without its cache."""

    prompt: list[int]
    vllm_xargs: dict[str, int]
    max_tokens: int = 1
    temperature: float = 0.0
    prompt_logprobs: int = 0


class _Logprob(msgspec.Struct):
    logprob: float


class _ScoredChoice(msgspec.Struct):
    prompt_logprobs: list[dict[str, _Logprob] | None] = []


class _Scored(msgspec.Struct):
    choices: list[_ScoredChoice] = []


class _ErrorDetail(msgspec.Struct):
    message: str
    code: str | int | None = None


class _ErrorBody(msgspec.Struct):
    error: _ErrorDetail


def new_session(engine_token: str, *, idle_timeout_s: float) -> aiohttp.ClientSession:
    """The connection pool to all engines. The bodies of answers are passed on as they come, so nothing is decompressed."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=idle_timeout_s),
        headers={"Authorization": f"Bearer {engine_token}", "Accept-Encoding": "identity"},
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
    )


class EngineClient:
    """One engine's private routes. Every method raises EngineError, or EngineRefused with the engine's own reason."""

    def __init__(self, endpoint: EngineEndpoint, session: aiohttp.ClientSession) -> None:
        self.id = endpoint.id
        self.base_url = endpoint.url.rstrip("/")
        self.session = session

    async def health(self, *, timeout_s: float) -> None:
        await self._call("GET", "/health", timeout_s=timeout_s)

    async def status(self, *, timeout_s: float = CONTROL_TIMEOUT_S) -> EngineStatus:
        """What the engine's core says of itself; a core that hangs gives no answer, whatever its health route says."""
        return self._decode(await self._call("GET", "/paceline/status", timeout_s=timeout_s), EngineStatus)

    async def stage(self, version: int, *, timeout_s: float) -> None:
        """Returns when the engine holds the verified artifact."""
        body = await self._call("POST", "/paceline/stage", StageRequest(version=version), timeout_s=timeout_s)
        staged = self._decode(body, _Staged).version
        if staged != version:
            raise EngineError(f"engine {self.id} staged draft {staged} when asked for {version}")

    async def commit(self, version: int, *, expected_active: int, timeout_s: float) -> CommitReport:
        request = CommitRequest(version=version, expected_active=expected_active)
        return self._decode(await self._call("POST", "/paceline/commit", request, timeout_s=timeout_s), CommitReport)

    async def stage_target(self, version: int, *, timeout_s: float) -> None:
        """Returns when the engine holds the verified version, and the way back from it."""
        body = await self._call("POST", "/paceline/target/stage", StageRequest(version=version), timeout_s=timeout_s)
        staged = self._decode(body, _Staged).version
        if staged != version:
            raise EngineError(f"engine {self.id} staged target {staged} when asked for {version}")

    async def commit_target(self, version: int, *, expected_active: int, deadline_s: float) -> TargetCommitReport:
        """The engine keeps the deadline itself, and after it takes back what it did."""
        request = TargetCommitRequest(version=version, expected_active=expected_active, deadline_s=deadline_s)
        timeout_s = deadline_s + CONTROL_TIMEOUT_S
        return self._decode(
            await self._call("POST", "/paceline/target/commit", request, timeout_s=timeout_s), TargetCommitReport
        )

    async def score(self, token_ids: Sequence[int], *, timeout_s: float) -> list[float]:
        """Log-probability at temperature 1 of each token but the first; the engine's cache is not read for it."""
        question = _Question(prompt=list(token_ids), vllm_xargs={"paceline_capture": 0})
        body = await self._call("POST", COMPLETIONS_PATH, question, timeout_s=timeout_s)
        choices = self._decode(body, _Scored).choices
        entries = choices[0].prompt_logprobs[1:] if choices else []
        if len(entries) != len(token_ids) - 1:
            raise EngineError(
                f"engine {self.id} told log-probabilities of {len(entries)} tokens when asked for {len(token_ids) - 1}"
            )
        try:
            return [(entry or {})[str(token)].logprob for token, entry in zip(token_ids[1:], entries, strict=True)]
        except KeyError as error:
            raise EngineError(f"engine {self.id} told no log-probability of token {error} of the prompt") from None

    async def set_capture(self, rate: float) -> None:
        await self._call("POST", "/paceline/capture", CaptureRequest(rate=rate))

    async def set_depth(self, depths: list[int]) -> list[int]:
        """Set K for batches of 1, 2, ... requests; returns what is in force."""
        body = await self._call("POST", "/paceline/depth", DepthRequest(depth=depths))
        return self._decode(body, DepthTable).depths

    async def metrics_text(self, *, timeout_s: float) -> str:
        """What Prometheus would be told."""
        try:
            return (await self._call("GET", "/metrics", timeout_s=timeout_s)).decode()
        except UnicodeDecodeError as error:
            raise EngineError(f"engine {self.id} answered GET /metrics with what is no text: {error}") from error

    async def _call(
        self, method: str, path: str, message: msgspec.Struct | None = None, *, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> bytes:
        data = None if message is None else msgspec.json.encode(message)
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        headers = {"Content-Type": "application/json"} if data is not None else None
        try:
            async with self.session.request(
                method, self.base_url + path, data=data, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                body = await response.read()
        except TimeoutError as error:
            raise EngineError(f"engine {self.id} did not answer {method} {path} within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            is_unreached = isinstance(error, aiohttp.ClientConnectorError)
            what = UNREACHED if is_unreached else f"broke off before it had answered {method} {path}"
            raise EngineError(f"engine {self.id} {what}") from error
        if response.status != 200:
            raise self._refusal(response.status, body, path)
        return body

    def _refusal(self, status: int, body: bytes, path: str) -> EngineRefused:
        try:
            detail = msgspec.json.decode(body, type=_ErrorBody).error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            text = body[:MAX_ERROR_CHARS].decode(errors="replace")
            detail = _ErrorDetail(message=f"HTTP {status} from {path}: {text}")
        return EngineRefused(status, f"engine {self.id}: {detail.message}", str(detail.code or "engine_error"))

    def _decode(self, body: bytes, kind: type[Answer]) -> Answer:
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise EngineError(f"engine {self.id} answered what is not a {kind.__name__}: {error}") from error
