"""PrefillLegs: has a prefill engine compute a prompt's KV, and sees to it that the blocks do not outlive their use.

A finished prefill leg is a lease: the prefill engine keeps the blocks until a decode engine has pulled them or the lease's time
is over. Where no decode leg follows, the lease is released by a request that a decode engine refuses for the name of its model:
vLLM then tells the prefill engine to free the blocks, without running a step (entrypoints/generate/base/serving.py:
_with_kv_transfer_rejection_cleanup). A lease is never handed to a second decode engine: the first may have pulled already, and
the blocks may hold another prompt since.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import aiohttp
import msgspec
from msgspec import Raw

from server.engines import UNREACHED
from server.fleet import Engine, EngineLost, Fleet
from server.metrics import Metrics
from server.paths import COMPLETIONS_PATH, GENERATE_PATH
from server.relay.breaker import Visit
from server.relay.exchange import FULL_REPORT, Exchange, Fields, Leg, tells_of_death, with_xargs

logger = logging.getLogger(__name__)

PREFILL_TIMEOUT_S = 60.0
"""For one prefill leg, the queue of its engine included; past it the decode engine computes the prompt itself."""
ABANDONED_S = 0.25
"""How long a leg goes on when nobody waits for it any more. An engine that is cut off with its answer on the way has granted a lease
that nobody is told of; short legs are likely to be met like that, and cost little to wait for."""
RELEASE_TIMEOUT_S = 5.0
MAX_RELEASES = 64
"""Running at once; further leases are left to run out."""
RELEASE_MODEL = "paceline-kv-release"
"""No engine serves a model of this name."""
CONNECTION_ERRORS = (aiohttp.ClientError, OSError, TimeoutError)

_ASK = Raw(
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,'
    b'"remote_host":null,"remote_port":null}'
)
_DROPPED = ("stream", "stream_options", "stream_interval", "min_tokens", "n", "max_completion_tokens")
_NOT_HANDED_OVER = ("use_beam_search", "prompt_logprobs", "echo", "prompt_embeds")
_TOLD_TO_WAIT = (408, 429)


def is_silence(error: BaseException) -> bool:
    """Whether an engine has a request and only takes long over it: no death, and no reason to have another one do it again."""
    return isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ConnectionTimeoutError)


def is_unreached(error: BaseException) -> bool:
    """Whether an engine was gone before the request came."""
    return isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)


def why_suspect(error: BaseException, task: str) -> str:
    """What to say of an engine that met a task with such an error, in words that clients may read."""
    return UNREACHED if is_unreached(error) else f"broke off in the middle of a {task}; it may have died"


class PrefillFailed(Exception):
    """No KV came of it; the decode engine computes the prompt itself. The message says why."""

    def __init__(self, why: str, *, is_death: bool = False) -> None:
        super().__init__(why)
        self.is_death = is_death
        """The engine died with the request, perhaps of it."""


class CannotHandOver(PrefillFailed):
    """The request itself cannot have its KV from elsewhere; no engine was asked."""


class PrefillRefused(Exception):
    """The request is at fault; the engine's answer is the client's."""

    def __init__(self, status: int, content_type: str, body: bytes) -> None:
        super().__init__(f"HTTP {status}")
        self.status = status
        self.content_type = content_type
        self.body = body


class Lease:
    """KV blocks that a prefill engine holds for one request."""

    def __init__(self, engine: Engine, params: Raw) -> None:
        self.engine = engine
        self.params = params
        """`kv_transfer_params` of the decode leg."""
        self.is_pulled = False

    def pull(self) -> None:
        """A decode engine has answered, so it has the blocks."""
        self.is_pulled = True
        self.engine.leases.discard(self)


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: Raw = Raw(b"null")


class _TransferParams(msgspec.Struct):
    remote_block_ids: list[Any] = []


class PrefillLegs:
    """Runs prefill legs and ends their leases."""

    def __init__(
        self,
        fleet: Fleet,
        session: aiohttp.ClientSession,
        metrics: Metrics,
        *,
        wants_full_report: Callable[[Engine], bool],
    ) -> None:
        self._fleet = fleet
        self._session = session
        self._metrics = metrics
        self._wants_full_report = wants_full_report
        self._releases: set[asyncio.Task[None]] = set()

    async def run(self, exchange: Exchange, leg: Leg, engine: Engine, decode_engine: Engine) -> Lease:
        """Raises PrefillFailed or PrefillRefused."""
        assert leg.fields is not None
        # A rollout's answer names the target of its tokens; its KV comes from nowhere else.
        reason = "rollouts are prefilled where they run" if leg.path == GENERATE_PATH else why_not_handed_over(leg.fields)
        if reason:
            raise CannotHandOver(reason)
        # Before anything else can run: the engine is counted, and tried if it is on trial, as of the choice that fell on it.
        stack = ExitStack()
        visit = stack.enter_context(engine.request())
        # A task of its own, because it may outlive its exchange.
        running = asyncio.ensure_future(self._run(exchange, leg.path, leg.fields, engine, visit))
        running.add_done_callback(lambda _: stack.close())
        try:
            lease = await engine.unless_lost(asyncio.shield(running))
        except EngineLost as error:
            self._abandon_soon(running, decode_engine)
            raise PrefillFailed(f"engine {engine.id} hangs", is_death=True) from error
        except asyncio.CancelledError:
            self._abandon_soon(running, decode_engine)
            raise
        if engine.is_changing or decode_engine.is_changing or engine.target_version != decode_engine.target_version:
            # Which of the two targets computed it, nobody can tell for certain. Held no longer than it must be: the engine cannot
            # change before it is gone.
            self._release_soon(lease, decode_engine)
            raise PrefillFailed(f"the target of engine {engine.id} changes")
        return lease

    async def _run(self, exchange: Exchange, path: str, fields: Fields, engine: Engine, visit: Visit) -> Lease:
        asked = prefill_body(fields, FULL_REPORT if self._wants_full_report(engine) else {})
        try:
            status, content_type, body = await self._post(engine, exchange, path, asked)
        except CONNECTION_ERRORS as error:
            if is_silence(error):
                engine.miss()
            else:
                engine.suspect(why_suspect(error, "prefill"), visit)
            is_death = not is_silence(error) and not is_unreached(error)
            raise PrefillFailed(f"engine {engine.id} failed: {type(error).__name__}", is_death=is_death) from error
        if 400 <= status < 500 and status not in _TOLD_TO_WAIT:
            raise PrefillRefused(status, content_type, body)
        if status != 200:
            is_death = tells_of_death(status, body)
            if is_death:
                engine.doubt(visit)
            raise PrefillFailed(f"engine {engine.id} answered {status}", is_death=is_death)
        engine.breaker.succeed(visit)
        params = _transfer_params(body)
        if params is None:
            raise PrefillFailed(f"engine {engine.id} offered no KV")
        engine.last_lease_s = time.monotonic()
        return Lease(engine, params)

    @contextmanager
    def held(self, lease: Lease, decode_engine: Engine) -> Iterator[None]:
        """Hold a lease while its decode leg runs; one that was not pulled by then is released."""
        self._metrics.leases_held.inc()
        lease.engine.leases.add(lease)
        try:
            yield
        finally:
            self._metrics.leases_held.dec()
            if lease.is_pulled:
                self._metrics.leases.labels("pulled").inc()
            else:
                lease.engine.leases.discard(lease)
                # The decode engine may have renewed it up to now.
                lease.engine.last_lease_s = time.monotonic()
                self._release_soon(lease, decode_engine)

    async def close(self) -> None:
        """End what still runs; leases that were not released run out."""
        for task in self._releases:
            task.cancel()
        await asyncio.gather(*self._releases, return_exceptions=True)

    def _release_soon(self, lease: Lease, decode_engine: Engine) -> None:
        if len(self._releases) >= MAX_RELEASES:
            self._metrics.leases.labels("expired").inc()
        else:
            self._start(self._release(lease, decode_engine))

    def _abandon_soon(self, running: asyncio.Future[Lease], decode_engine: Engine) -> None:
        if len(self._releases) >= MAX_RELEASES:
            running.cancel()
        else:
            self._start(self._abandon(running, decode_engine))

    async def _abandon(self, running: asyncio.Future[Lease], decode_engine: Engine) -> None:
        """End a leg that nobody waits for any more, and the lease it may have come to."""
        try:
            await asyncio.wait((running,), timeout=ABANDONED_S)
        finally:
            running.cancel()
        (lease,) = await asyncio.gather(running, return_exceptions=True)
        if isinstance(lease, Lease):
            await self._release(lease, decode_engine)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _release(self, lease: Lease, decode_engine: Engine) -> None:
        if not lease.engine.ready:
            self._metrics.leases.labels("expired").inc()
            return
        others = [engine for engine in self._fleet.ready() if engine.can_decode and engine is not decode_engine]
        # A second try only, for when the decode engine is what failed.
        for engine in [*[decode_engine] * decode_engine.ready, *others][:2]:
            try:
                async with asyncio.timeout(RELEASE_TIMEOUT_S):
                    status = await self._post_release(engine, lease)
            except CONNECTION_ERRORS:
                continue
            if 400 <= status < 500:
                self._metrics.leases.labels("released").inc()
                return
        self._metrics.leases.labels("expired").inc()

    async def _post_release(self, engine: Engine, lease: Lease) -> int:
        refused = {"model": RELEASE_MODEL, "prompt": [0], "max_tokens": 1, "kv_transfer_params": lease.params}
        headers = {"Content-Type": "application/json"}
        url = engine.client.base_url + COMPLETIONS_PATH
        asked = self._session.post(url, data=msgspec.json.encode(refused), headers=headers, allow_redirects=False)
        async with asked as response:
            return response.status

    async def _post(self, engine: Engine, exchange: Exchange, path: str, body: bytes) -> tuple[int, str, bytes]:
        # The same id as on the decode leg: each engine appends its own suffix, and the blocks are named by that.
        headers = exchange.upstream_headers()
        async with asyncio.timeout(PREFILL_TIMEOUT_S):
            url = engine.client.base_url + path
            async with self._session.post(url, data=body, headers=headers, allow_redirects=False) as response:
                return response.status, response.content_type, await response.read()


def why_not_handed_over(fields: Fields) -> str:
    """Why a request's KV cannot come from another engine; empty when it can.

    Each choice would pull the blocks, and the first pull frees them; prompt log-probabilities need the prompt computed here.
    """
    for name in _NOT_HANDED_OVER:
        if bytes(fields.get(name, b"null")) not in (b"null", b"false"):
            return f"{name} needs the prompt computed where it is decoded"
    if bytes(fields.get("n", b"null")) not in (b"null", b"1"):
        return "several choices cannot share one hand-over"
    return ""


def prefill_body(fields: Fields, xargs: Fields) -> bytes:
    """What a prefill engine is asked: the same prompt, one token, and its KV held for another engine.

    It is not captured: the learner trains on requests with two rows of completion or more (learner/assemble.py), and these have
    one. The decode leg is captured as any request with a cached prompt is.
    """
    kept = {name: value for name, value in fields.items() if name not in _DROPPED}
    kept["vllm_xargs"] = with_xargs(fields, {"paceline_capture": Raw(b"0"), **xargs})
    kept["max_tokens"] = Raw(b"1")
    if "max_completion_tokens" in fields:
        kept["max_completion_tokens"] = Raw(b"1")
    kept["kv_transfer_params"] = _ASK
    return msgspec.json.encode(kept)


def _transfer_params(body: bytes) -> Raw | None:
    """None where the engine holds no blocks."""
    try:
        params = msgspec.json.decode(body, type=_PrefillAnswer).kv_transfer_params
        blocks = msgspec.json.decode(params, type=_TransferParams | None)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if blocks is None or not any(blocks.remote_block_ids):
        return None
    # The answer's buffer, prompt text included, is not kept alive for it.
    return params.copy()
