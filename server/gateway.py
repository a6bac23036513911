"""Gateway: builds every part, wires them, and runs both ports in one event loop until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import sys
import time
from functools import partial
from typing import Any

import uvicorn
import zmq.asyncio

from server.acceptance import AcceptanceLedger
from server.admin import admin_app
from server.admission import Admission
from server.calibration import calibrate
from server.canary import Canary
from server.chores import Chore, Chores
from server.collectors import AcceptanceCollector, CalibrationCollector, FleetCollector, LearnerCollector
from server.completions import ModelRoute
from server.config import KV_STORE_DIRECTORY, GatewayConfig
from server.connections import BoundedHttp
from server.depth.admin import depth_routes
from server.depth.collector import DepthCollector
from server.depth.control import DepthControl
from server.drafts import Drafts
from server.engines import EngineClient, new_session
from server.events import StatsListener
from server.fleet import Engine, Fleet
from server.floor import FloorWatch
from server.generate import GenerateRoute
from server.health import HealthMonitor
from server.history import History, history_routes
from server.learner_link import LearnerLink
from server.metrics import Metrics
from server.paths import GENERATE_PATH
from server.public import public_app
from server.recorder import Recorder
from server.relay.legs import Legs
from server.relay.prefill import PrefillLegs
from server.relay.proxy import Proxy
from server.relay.resume import Resumption
from server.routing.index import KvIndex
from server.routing.kv_events import KvListener
from server.routing.metrics import RoutingMetrics
from server.routing.router import Router
from server.routing.tokens import Prompts
from server.scrape import MetricsPage
from server.state.dfkv import DfkvState
from server.state.engines import EngineState, engine_facts
from server.state.posix import PosixState
from server.state.store import StateStore
from server.status import StatusPage
from server.swap import SwapCoordinator
from server.target_swap import TargetCoordinator
from server.targets import Targets
from server.traffic import Traffic
from server.transfers import TransferWatch
from server.ui import LivePage
from wire.control import CalibrationView
from wire.dfkv import DfkvClient, DfkvServers
from wire.errors import ConfigError
from wire.kv_files import KvDirectory
from wire.store import DraftStore
from wire.target import TargetStore

MAX_THREAD_TURN_S = 0.0005
"""How long another thread may hold the interpreter while the event loop waits for it; Python's default is ten times that."""
LAST_CALL_SHARE = 0.8
"""Of the grace time: what runs then is told that the server stops, before its connection is cut."""
WINDOW_PER_VERDICT = 10
"""The recent window of AL holds that many times the verify steps of a canary's verdict."""


class Gateway:
    """One gateway process. Made inside a running event loop."""

    def __init__(self, config: GatewayConfig, *, operator_token: str, engine_token: str) -> None:
        settings = config.gateway
        self.config = config
        self.metrics = Metrics()
        self.chores = Chores(self.metrics)
        self._last_call = asyncio.Event()
        self.session = new_session(engine_token, idle_timeout_s=settings.engine_idle_timeout_s)
        self.context = zmq.asyncio.Context()
        self.fleet = Fleet([Engine(EngineClient(end, self.session), end.events_endpoint, end.kind) for end in config.engines])
        self.ledger = AcceptanceLedger(
            max_label_values=settings.max_label_values, window_steps=WINDOW_PER_VERDICT * config.canary.min_verify_steps
        )
        targets = Targets(TargetStore(config.state_dir))
        self.drafts = Drafts(DraftStore(config.state_dir), target_since_s=targets.since_s)
        self.canary = Canary(self.ledger, config.canary)
        self.floor_watch = FloorWatch(self.ledger, self.drafts, config.canary)
        changing = asyncio.Lock()
        self.target = TargetCoordinator(
            self.fleet,
            targets,
            self.metrics,
            changing,
            deadline_s=settings.swap_deadline_s,
            forget_kv=partial(self._forget_kv, is_restarted=False),
            acceptance_length=self._acceptance_length,
            on_change=self._target_changed,
        )
        self.swap = SwapCoordinator(
            self.fleet,
            self.drafts,
            self.canary,
            self.floor_watch,
            self.metrics,
            deadline_s=settings.swap_deadline_s,
            calibration=self.calibration,
            target=self.target,
            lock=changing,
        )
        self.health = HealthMonitor(self.fleet, self.swap, settings, on_change=self._forget_kv)
        self.depth = DepthControl(self.fleet, config.depth)
        self.listener = StatsListener(self.context, self.ledger, self.canary, self.swap, self.depth, self.metrics)
        self.learner = LearnerLink()
        self.admission = Admission(config.admission)
        self.traffic = Traffic(self.metrics)
        self.prefills = PrefillLegs(self.fleet, self.session, self.metrics, wants_full_report=self._wants_full_report)
        self.routing_metrics = RoutingMetrics(self.metrics.registry)
        self.kv_index = KvIndex(config.routing.max_index_blocks)
        self.kv_listener = self._new_kv_listener(self.routing_metrics) if config.kv_events_endpoint else None
        self.prompts = Prompts(config.target_dir, self._max_model_len) if len(config.engines) > 1 else None
        """None where there is one engine: nothing depends on what it is asked."""
        self.router = Router(self.fleet, self.kv_index, config.routing, self.routing_metrics)
        self.proxy = Proxy(
            self.fleet,
            self.metrics,
            prompts=self.prompts,
            router=self.router,
            legs=Legs(
                self.session,
                self.metrics,
                router=self.router,
                prefills=self.prefills,
                wants_full_report=self._wants_full_report,
            ),
            open_stream=Resumption(self.fleet, self.prompts.tokenizer if self.prompts else None).open,
            max_moves=config.routing.max_moves,
        )
        self.status = StatusPage(self)
        self._started_s = time.monotonic()
        self._register_collectors()
        self.public = public_app(
            fleet=self.fleet, route=self._route, metrics_text=MetricsPage(self.metrics.registry, self.fleet).text
        )
        self.history = History(self.swap.history, self.calibration)
        admin = admin_app(
            token=operator_token,
            fleet=self.fleet,
            swap=self.swap,
            drafts=self.drafts,
            learner=self.learner,
            health=self.health,
            status=self.status.build,
            routing=self.router.view,
            stores=self._state_stores(),
            target=self.target,
        )
        admin.include_router(history_routes(self.history))
        admin.include_router(depth_routes(self.depth.view))
        self.admin = LivePage(admin)

    def calibration(self) -> CalibrationView:
        """How simulated AL goes with served AL, as of now."""
        return calibrate(
            self.drafts.simulated_al,
            self.ledger.totals_by_version(),
            min_verify_steps=self.config.canary.min_verify_steps,
        )

    @property
    def uptime_s(self) -> float:
        return time.monotonic() - self._started_s

    async def serve(self, public_socket: socket.socket, admin_socket: socket.socket, stop: asyncio.Event) -> None:
        """Run until `stop` is set, then let running requests end within the grace time."""
        _favour_latency()
        public, admin = self._server(self.public), self._server(self.admin)
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self.context.destroy, linger=0)
            if self.prompts is not None:
                stack.callback(self.prompts.close)
            await stack.enter_async_context(self.session)
            stack.push_async_callback(self.prefills.close)
            await stack.enter_async_context(self.chores.running(self._chores()))
            servers = [
                asyncio.ensure_future(public.serve(sockets=[public_socket])),
                asyncio.ensure_future(admin.serve(sockets=[admin_socket])),
            ]
            stopping = asyncio.ensure_future(stop.wait())
            await asyncio.wait([*servers, stopping], return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            asyncio.get_running_loop().call_later(self._grace_s * LAST_CALL_SHARE, self._last_call.set)
            public.should_exit = admin.should_exit = True
            await asyncio.gather(*servers)

    def _state_stores(self) -> list[StateStore]:
        """Where KV can be, the engines' own caches first."""
        stores: list[StateStore] = [EngineState(self.kv_index, partial(engine_facts, self.fleet))]
        kept = self.config.kv_store
        if kept.enabled and kept.dfkv is not None:
            stores.append(DfkvState(DfkvClient(kept.dfkv), DfkvServers(kept.dfkv)))
        elif kept.enabled:
            stores.append(PosixState(KvDirectory(self.config.state_dir / KV_STORE_DIRECTORY)))
        return stores

    def _chores(self) -> dict[str, Chore]:
        transfers = TransferWatch(self.fleet, self.router.costs)
        chores: dict[str, Chore] = {
            "drafts": self._watch_drafts,
            "transfers": transfers.watch,
            "history": Recorder(self).record,
        }
        if self.kv_listener is not None:
            chores["kv_events"] = self.kv_listener.listen
        each = {
            "health": self.health.watch,
            "core": self.health.watch_core,
            "stats": self.listener.listen,
            "depth": self.depth.apply,
        }
        for engine in self.fleet.engines:
            chores |= {f"{name} of {engine.id}": partial(chore, engine) for name, chore in each.items()}
        return chores

    async def _watch_drafts(self) -> None:
        """Both watches see every round, whatever becomes of the other."""
        while True:
            await asyncio.sleep(self.config.canary.check_every_s)
            await self.chores.try_once("canary", self.swap.check_canary)
            await self.chores.try_once("floor", self.swap.check_floor)

    def _route(self, path: str) -> ModelRoute:
        parts = (self.proxy, self.admission, self.traffic, self._last_call.wait)
        if path == GENERATE_PATH:
            return GenerateRoute(*parts, fleet=self.fleet, target_version=lambda: self.target.targets.active)
        return ModelRoute(path, *parts)

    @property
    def _grace_s(self) -> int:
        """As the web server takes it."""
        return max(round(self.config.gateway.shutdown_grace_s), 1)

    def _max_model_len(self) -> int:
        """Of all engines, 0 while none is known."""
        return max((engine.status.kv.max_model_len for engine in self.fleet.engines if engine.status), default=0)

    def _forget_kv(self, engine: Engine, is_restarted: bool) -> None:
        """Another process, or the same one with another target, answers under this engine's id."""
        if self.kv_listener is None:
            return
        if is_restarted:
            self.kv_listener.engine_restarted(engine.id)
        else:
            self.kv_listener.engine_changed(engine.id)

    def _acceptance_length(self) -> float | None:
        """Recent AL of the active draft."""
        active = self.drafts.active
        recent = self.ledger.recent_of(active) if active is not None else None
        return recent.acceptance_length if recent is not None and recent.num_verify_steps else None

    def _target_changed(self, version: int) -> None:
        """What drafts did under the target before is no measure of what they do now: a canary would blame its draft for it, the
        floor watch would ask of it what the floor did then, and depth would be chosen by it."""
        self.canary.supersede(f"target {version} was activated")
        self.ledger.forget_recent()
        self.floor_watch.forget()
        self.depth.forget_acceptance()
        self.drafts.forget_simulated()

    def _wants_full_report(self, engine: Engine) -> bool:
        return self.kv_listener is not None and self.kv_listener.wants_full_report(engine.id)

    def _new_kv_listener(self, metrics: RoutingMetrics) -> KvListener:
        addresses = {end.id: end.kv_replay_endpoint for end in self.config.engines}
        return KvListener(self.context, self.config.kv_events_endpoint, addresses, self.kv_index, metrics)

    def _register_collectors(self) -> None:
        registry = self.metrics.registry
        self.metrics.in_flight.set_function(lambda: self.admission.num_in_flight)
        registry.register(AcceptanceCollector(self.ledger, self.drafts))
        registry.register(FleetCollector(self.fleet, self.drafts))
        registry.register(LearnerCollector(self.learner))
        registry.register(DepthCollector(self.depth))
        registry.register(CalibrationCollector(self.calibration))

    def _server(self, app: Any) -> uvicorn.Server:
        return _Server(
            uvicorn.Config(
                app,
                http=BoundedHttp,
                ws="none",
                log_config=None,
                access_log=False,
                lifespan="off",
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=self._grace_s,
            )
        )


def _favour_latency() -> None:
    """Shorten the waits of the event loop: for the threads that read prompts, and for the collection of what lives on anyway."""
    sys.setswitchinterval(MAX_THREAD_TURN_S)
    gc.collect()
    gc.freeze()


class _Server(uvicorn.Server):
    """Two servers share the process, so neither may own its signals; `main` does."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


def bind(host: str, port: int) -> socket.socket:
    """A bound socket; raises ConfigError naming the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio switches Nagle's algorithm off only where the protocol is named; with it on, answers wait 40 ms for an ACK.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error}; stop what uses it, or choose another port") from error
    return bound
