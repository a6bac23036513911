"""A system of stand-ins whose processes are started again when they die, as `paceline up` does it for real ones."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from alphabet_target import write_target

from loadtest.mock_engine import Pace
from loadtest.processes import running_process
from loadtest.rig import OPERATOR_TOKEN, gateway_config, gateway_process, mock_addresses
from loadtest.statistics import Interval
from wire.ports import free_ports

Start = Callable[[], AbstractAsyncContextManager[subprocess.Popen[bytes]]]
LOOK_EVERY_S = 0.02
LEARNER = [sys.executable, "-c", "import signal; signal.pause()"]
"""Lives, and reports nothing: to serving, that is one more learner that is silent."""


class Keeper:
    """Keeps processes alive, and their pids in `system.json`."""

    def __init__(self, system_file: Path, description: dict[str, Any]) -> None:
        self.outages: defaultdict[str, list[Interval]] = defaultdict(list)
        """By process, Unix time; from when it was seen dead until it was ready again."""
        self._system_file = system_file
        self._description = description
        self._pids: dict[str, int | None] = {}
        self._is_up: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    async def keep(self, name: str, start: Start) -> None:
        """Until cancelled."""
        dead_at_s: float | None = None
        while True:
            async with start() as process:
                if dead_at_s is not None:
                    self.outages[name].append(Interval(dead_at_s, time.time()))
                self._note(name, process.pid)
                self._is_up[name].set()
                while process.poll() is None:
                    await asyncio.sleep(LOOK_EVERY_S)
                dead_at_s = time.time()
                self._is_up[name].clear()
                self._note(name, None)

    async def until_up(self, *names: str) -> None:
        for name in names:
            await self._is_up[name].wait()

    def _note(self, name: str, pid: int | None) -> None:
        self._pids[name] = pid
        processes = {one: {"pid": number} for one, number in self._pids.items()}
        written = self._system_file.with_suffix(".new")
        written.write_text(json.dumps({**self._description, "processes": processes}))
        written.replace(self._system_file)


@asynccontextmanager
async def kept_system(state_dir: Path) -> AsyncIterator[Keeper]:
    """Two engines, a learner that learns nothing and the real gateway, as `bench run --state` finds them."""
    (state_dir / "run").mkdir(parents=True)
    (state_dir / "run" / "operator.token").write_text(OPERATOR_TOKEN)
    target_dir = write_target(state_dir / "target")
    addresses = mock_addresses(2, Pace(first_token_s=0.02, between_tokens_s=0.01), target_dir=str(target_dir))
    port, admin_port = free_ports(2)
    url = f"http://127.0.0.1:{port}"
    description = {"gateway_url": url, "admin_url": f"http://127.0.0.1:{admin_port}"}
    starts: dict[str, Start] = {
        address.id: partial(running_process, address.argv(), ready_url=f"{address.url}/health") for address in addresses
    }
    # It asks for nothing to begin with, so it is ready as soon as an engine is.
    starts["learner"] = partial(running_process, LEARNER, ready_url=f"{addresses[1].url}/health")
    config = {**gateway_config(addresses), "state_dir": str(state_dir)}
    starts["gateway"] = partial(gateway_process, config, port=port, admin_port=admin_port)
    keeper = Keeper(state_dir / "run" / "system.json", description)
    async with asyncio.TaskGroup() as group:
        keeping = [group.create_task(keeper.keep(name, start)) for name, start in starts.items()]
        await keeper.until_up(*starts)
        yield keeper
        for task in keeping:
            task.cancel()
