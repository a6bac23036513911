"""Mock engines and gateways as processes, to measure what lies between a client and an engine.

Gateways are configured by the JSON the launcher would write, and started by the same command.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.mock_engine import Pace
from loadtest.processes import running_process
from wire.environment import ENGINE_TOKEN_VARIABLE, OPERATOR_TOKEN_VARIABLE
from wire.ports import free_ports

OPERATOR_TOKEN = "bench-operator"
_ENGINE_TOKEN = "bench-engine"
_DEADLINE_S = 60.0


@dataclass(frozen=True)
class MockAddress:
    """Where one mock engine is, running or to be started again."""

    id: str
    port: int
    events_port: int
    pace: Pace
    target_dir: str | None
    """Whose vocabulary it speaks."""
    kv_events_endpoint: str = ""
    """Where its gateway takes KV events; empty: it tells of none."""
    num_kv_blocks: int = 0
    """Held from the start."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def endpoint(self) -> dict[str, Any]:
        """As a gateway's configuration names it."""
        return {"id": self.id, "url": self.url, "events_endpoint": self._events_endpoint}

    def argv(self) -> list[str]:
        """The command that starts it."""
        target = ["--target-dir", self.target_dir] if self.target_dir else []
        return [
            *(sys.executable, "-m", "loadtest.mock_engine", "--id", self.id, "--port", str(self.port)),
            *("--events-endpoint", self._events_endpoint),
            *("--first-token-s", str(self.pace.first_token_s), "--between-tokens-s", str(self.pace.between_tokens_s)),
            *target,
            *("--kv-events-endpoint", self.kv_events_endpoint, "--kv-blocks", str(self.num_kv_blocks)),
        ]

    @property
    def _events_endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.events_port}"


def mock_addresses(
    number: int, pace: Pace, *, target_dir: str | None = None, kv_events_endpoint: str = "", num_kv_blocks: int = 0
) -> list[MockAddress]:
    """Addresses for that many mock engines, on free ports; `num_kv_blocks` each."""
    ports = free_ports(2 * number)
    return [
        MockAddress(
            f"engine-{index}", ports[2 * index], ports[2 * index + 1], pace, target_dir, kv_events_endpoint, num_kv_blocks
        )
        for index in range(number)
    ]


@asynccontextmanager
async def running_mocks(addresses: Sequence[MockAddress]) -> AsyncIterator[list[int]]:
    """Start a mock engine at each address; yields their pids."""
    async with AsyncExitStack() as stack:
        yield [
            (await stack.enter_async_context(running_process(address.argv(), ready_url=f"{address.url}/health"))).pid
            for address in addresses
        ]


def gateway_config(engines: Sequence[MockAddress]) -> dict[str, Any]:
    """The resolved configuration of a gateway in front of mock engines, its state directory and ports still to be set."""
    endpoints = [engine.endpoint() for engine in engines]
    target_dir = engines[0].target_dir
    return {"gateway": {}, "admission": {}, "canary": {}, "routing": {}, "engines": endpoints, "target_dir": target_dir}


@asynccontextmanager
async def running_gateway(
    config: Mapping[str, Any],
    *,
    engine_token: str = _ENGINE_TOKEN,
    kv_events_endpoint: str = "",
    admin_port: int | None = None,
    cores: Collection[int] = (),
) -> AsyncIterator[str]:
    """A gateway process with this configuration on free ports; yields the URL of its public port when it is ready.

    An engine sends KV events to one gateway only, so the configuration's own endpoint is not used. The admin port takes
    `OPERATOR_TOKEN`.
    """
    port, free_admin_port = free_ports(2)
    async with gateway_process(
        config,
        port=port,
        admin_port=admin_port or free_admin_port,
        engine_token=engine_token,
        kv_events_endpoint=kv_events_endpoint,
        cores=cores,
    ):
        yield f"http://127.0.0.1:{port}"


@asynccontextmanager
async def gateway_process(
    config: Mapping[str, Any],
    *,
    port: int,
    admin_port: int,
    engine_token: str = _ENGINE_TOKEN,
    kv_events_endpoint: str = "",
    cores: Collection[int] = (),
) -> AsyncIterator[subprocess.Popen[bytes]]:
    """The same as a process, on these ports."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as directory:
        own = {
            "gateway": {**config["gateway"], "port": port, "admin_port": admin_port},
            "kv_events_endpoint": kv_events_endpoint,
        }
        path = Path(directory) / "gateway.json"
        path.write_text(json.dumps({"state_dir": directory, **config, **own}))
        environment = os.environ | {OPERATOR_TOKEN_VARIABLE: OPERATOR_TOKEN, ENGINE_TOKEN_VARIABLE: engine_token}
        argv = [sys.executable, "-m", "launch.cli", "serve", "--resolved", str(path)]
        url = f"http://127.0.0.1:{port}/ready"
        async with running_process(
            argv, ready_url=url, environment=environment, deadline_s=_DEADLINE_S, cores=cores
        ) as process:
            yield process
