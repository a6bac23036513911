"""GatewayRig: the real gateway on real sockets, in front of fake engines, with a store of small artifacts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from fake_engine import TOKEN, FakeEngine
from samples import SPEC, fill, fill_target
from waiting import DEADLINE_S

from server.config import (
    AdmissionSettings,
    CanarySettings,
    DepthSettings,
    GatewayConfig,
    GatewaySettings,
    KvStoreSettings,
    PoolKind,
    RoutingSettings,
)
from server.gateway import Gateway, bind
from wire.artifact import GateReport
from wire.messages import AcceptanceCount
from wire.spec import CaptureSpec
from wire.store import DraftStore
from wire.target import TargetStore

OPERATOR_TOKEN = "operator-token"
ACCEPTED = GateReport(
    accepted=True, reason="better", candidate_al=2.0, incumbent_al=1.5, gain_low=0.2, gain_high=0.6, num_requests=8
)
REJECTED = GateReport(
    accepted=False, reason="no gain", candidate_al=1.4, incumbent_al=1.5, gain_low=-0.2, gain_high=0.1, num_requests=8
)


def publish(state_dir: Path, *, gate: GateReport | None = ACCEPTED, spec: CaptureSpec = SPEC, parent: int | None = None) -> int:
    """Add one artifact to the store."""

    return DraftStore(state_dir).publish(partial(fill, gate=gate, spec=spec, parent=parent))


def publish_target(state_dir: Path, **options: Any) -> int:
    """Add a version of the target to the store."""
    return TargetStore(state_dir).publish(partial(fill_target, **options))


@dataclass
class Reply:
    status: int
    headers: Any
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """`error.code`, after a look at the error's shape."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert error["type"]
        return str(error["code"])


class GatewayRig:
    """Clients' and operators' view of one running gateway."""

    def __init__(
        self, gateway: Gateway, engines: list[FakeEngine], public_url: str, admin_url: str, stop: asyncio.Event
    ) -> None:
        self.gateway = gateway
        self.engines = engines
        self.engine = engines[0]
        self.public_url = public_url
        self.admin_url = admin_url
        self.state_dir = gateway.config.state_dir
        self.stop = stop
        self.session = aiohttp.ClientSession()

    async def request(self, method: str, path: str, **options: Any) -> Reply:
        async with self.session.request(method, self.public_url + path, **options) as response:
            return Reply(response.status, response.headers, await response.read())

    async def complete(self, headers: dict[str, str] | None = None, **fields: Any) -> Reply:
        return await self.request("POST", "/v1/completions", json={"prompt": "p", **fields}, headers=headers)

    async def admin(self, method: str, path: str, *, token: str = OPERATOR_TOKEN, **options: Any) -> Reply:
        headers = {"Authorization": f"Bearer {token}"} | options.pop("headers", {})
        async with self.session.request(method, self.admin_url + path, headers=headers, **options) as response:
            return Reply(response.status, response.headers, await response.read())

    async def activate(self, version: int | str, expected: int, *, force: bool = False, key: str | None = None) -> Reply:
        headers = {} if key is None else {"Idempotency-Key": key}
        body = {"expected_active": expected, "force": force}
        return await self.admin("POST", f"/admin/drafts/{version}/activate", json=body, headers=headers)

    async def activate_target(self, version: int | str, expected: int, *, key: str | None = None, **fields: Any) -> Reply:
        headers = {} if key is None else {"Idempotency-Key": key}
        body = {"expected_active": expected, **fields}
        return await self.admin("POST", f"/admin/targets/{version}/activate", json=body, headers=headers)

    async def roll_back_target(self, expected: int) -> Reply:
        return await self.admin("POST", "/admin/targets/rollback", json={"expected_active": expected})

    async def status(self) -> Any:
        return (await self.admin("GET", "/admin/status")).json

    async def metric(self, line_start: str) -> float | None:
        text = (await self.request("GET", "/metrics")).body.decode()
        lines = [line for line in text.splitlines() if line.startswith(line_start + " ")]
        return float(lines[0].rsplit(" ", 1)[1]) if lines else None

    async def count(self, engine: FakeEngine, version: int, num_steps: int, accepted: tuple[int, ...], **labels: str) -> None:
        """Let an engine's cumulative counters show these numbers, and wait until the gateway has them."""
        count = AcceptanceCount(
            draft_version=version,
            tenant=labels.get("tenant", "default"),
            domain=labels.get("domain", "default"),
            num_verify_steps=num_steps,
            proposed_per_position=[num_steps] * len(accepted),
            accepted_per_position=list(accepted),
        )
        same = (version, count.tenant, count.domain)
        others = [one for one in engine.acceptance if (one.draft_version, one.tenant, one.domain) != same]
        engine.acceptance = [*others, count]
        engine.num_captured_rows += 1
        target = engine.num_captured_rows
        ledger = self.gateway.ledger

        async def arrived() -> bool:
            await engine.publish_stats()
            await asyncio.sleep(0.005)
            seen = ledger._seen.get(engine.id)
            return seen is not None and seen.epoch == engine.epoch and seen.num_captured_rows >= target

        await eventually(arrived)


async def eventually(condition: Callable[[], bool | Awaitable[bool]], timeout_s: float = DEADLINE_S) -> None:
    """Wait until `condition` holds."""
    async with asyncio.timeout(timeout_s):
        while True:
            holds = condition()
            if holds if isinstance(holds, bool) else await holds:
                return
            await asyncio.sleep(0.005)


@asynccontextmanager
async def running(
    state_dir: Path,
    *,
    num_engines: int = 1,
    kinds: tuple[PoolKind, ...] = (),
    target_dir: Path | None = None,
    routing: RoutingSettings | None = None,
    kv_events_endpoint: str = "",
    kv_store: KvStoreSettings | None = None,
    depth: DepthSettings | None = None,
    engine_versions: tuple[int, ...] = (),
    admission: AdmissionSettings | None = None,
    canary: CanarySettings | None = None,
    settings: dict[str, Any] | None = None,
    wait_ready: bool = True,
    before: Callable[[list[FakeEngine]], None] = lambda engines: None,
) -> AsyncIterator[GatewayRig]:
    """A gateway with draft 0 active (and the floor) and fake engines: `num_engines`, or one of each of `kinds`."""
    store = DraftStore(state_dir)
    if store.active() is None:
        version = publish(state_dir, gate=None)
        store.set_active(version)
        store.set_floor(version)
    versions = engine_versions or (store.active() or 0,) * (len(kinds) or num_engines)
    engines = [FakeEngine(f"engine-{i}", SPEC, state_dir, draft_version=v) for i, v in enumerate(versions)]
    for engine, kind in zip(engines, kinds, strict=False):
        engine.kind = kind
    for engine in engines:
        engine.peers = {other.id: other for other in engines}
    before(engines)
    for engine in engines:
        await engine.start()
    config = GatewayConfig(
        gateway=GatewaySettings(
            port=0, admin_port=0, **({"health_interval_s": 0.02, "shutdown_grace_s": 1} | (settings or {}))
        ),
        admission=admission or AdmissionSettings(),
        canary=canary or CanarySettings(check_every_s=0.01),
        routing=routing or RoutingSettings(),
        target_dir=target_dir,
        kv_events_endpoint=kv_events_endpoint,
        kv_store=kv_store or KvStoreSettings(),
        depth=depth or DepthSettings(),
        engines=tuple(engine.endpoint for engine in engines),
        state_dir=state_dir,
    )
    gateway = Gateway(config, operator_token=OPERATOR_TOKEN, engine_token=TOKEN)
    public, admin = bind("127.0.0.1", 0), bind("127.0.0.1", 0)
    urls = [f"http://127.0.0.1:{bound.getsockname()[1]}" for bound in (public, admin)]
    stop = asyncio.Event()
    serving = asyncio.create_task(gateway.serve(public, admin, stop))
    rig = GatewayRig(gateway, engines, *urls, stop)
    try:
        if wait_ready:
            await eventually(lambda: len(gateway.fleet.ready()) == len(engines))
        yield rig
    finally:
        await rig.session.close()
        stop.set()
        await serving
        for engine in engines:
            await engine.close()


def run(scenario: Coroutine[Any, Any, None]) -> None:
    """Run one scenario; no test waits longer than this."""

    async def bounded() -> None:
        async with asyncio.timeout(2 * DEADLINE_S):
            await scenario

    asyncio.run(bounded())


def target_commits(rig: GatewayRig) -> list[list[str]]:
    """The changes of target each engine was asked for, in order."""
    return [[call for call in engine.calls if call.startswith("commit target")] for engine in rig.engines]
