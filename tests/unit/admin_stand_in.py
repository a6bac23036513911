"""An admin port on a real socket that changes the target of a `GenerateStandIn`, and answers as it is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from aiohttp import web
from generate_stand_in import GenerateStandIn

from wire.target import BASE_VERSION, TargetStore
from wire.target_control import ActivateTargetRequest, TargetList, TargetSwapReport

TOKEN = "operator"
REFUSALS = {
    "swap_in_progress": 409,
    "no_engine_ready": 503,
    "swap_refused": 409,
    "commit_failed": 409,
    "bad_artifact": 422,
    "engine_error": 502,
}


@dataclass
class AdminStandIn:
    state_dir: Path
    engines: GenerateStandIn
    fault: Callable[[int], str] = lambda number: ""
    """By the number of the wish: one of REFUSALS, `lost` (done, and the answer lost), `gone` (not done, nor answered) or `other`
    (somebody else activates version 0 first)."""
    wishes: list[tuple[int, ActivateTargetRequest]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    url: str = ""
    _refused: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Refusals by key, which the gateway gives again (`server/admin.py`): below 500, but for a swap under way."""

    async def __aenter__(self) -> AdminStandIn:
        app = web.Application()
        app.router.add_get("/admin/targets", self._list)
        app.router.add_post("/admin/targets/{version}/activate", self._activate)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    @property
    def store(self) -> TargetStore:
        return TargetStore(self.state_dir)

    async def _list(self, request: web.Request) -> web.Response:
        _require_token(request)
        listing = TargetList(active_version=self.engines.version, previous_version=None, targets=[], swaps=[])
        return web.Response(body=msgspec.json.encode(listing))

    async def _activate(self, request: web.Request) -> web.Response:
        _require_token(request)
        version = int(request.match_info["version"])
        wish = msgspec.json.decode(await request.read(), type=ActivateTargetRequest)
        fault = self.fault(len(self.wishes))
        self.wishes.append((version, wish))
        key = request.headers["Idempotency-Key"]
        self.keys.append(key)
        if key in self._refused:
            return _error(*self._refused[key])
        if fault in REFUSALS:
            return self._refuse(key, fault, REFUSALS[fault])
        if fault == "other":
            self.engines.version = 0
        if fault == "gone":
            return self._hang_up(request)
        if self.engines.version != wish.expected_active:
            return self._refuse(key, "stale_expected_active", 409)
        previous, self.engines.version = self.engines.version, version
        if version != BASE_VERSION:
            self.store.verify(version)
        self.store.root.mkdir(exist_ok=True)
        self.store.set_active(version)
        if fault == "lost":
            return self._hang_up(request)
        report = TargetSwapReport(
            version=version,
            previous=previous,
            trigger="activate",
            outcome="committed",
            reason=wish.reason,
            started_at_s=0.0,
            duration_ms=1.0,
            acceptance_length=1.5,
        )
        return web.Response(body=msgspec.json.encode(report))

    def _refuse(self, key: str, code: str, status: int) -> web.Response:
        if status < 500 and code != "swap_in_progress":
            self._refused[key] = status, code
        return _error(status, code)

    def _hang_up(self, request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()


def _require_token(request: web.Request) -> None:
    assert request.headers["Authorization"] == f"Bearer {TOKEN}"


def _error(status: int, code: str) -> web.Response:
    return web.json_response({"error": {"message": f"it is {code}", "code": code}}, status=status)
