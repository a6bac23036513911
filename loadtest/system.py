"""A real system for measurements: `paceline up` in a state directory of its own, on free ports, stopped at the end.

Also stock engines: without speculation for reference outputs, without our parts to price them.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from yarl import URL

from loadtest.client import new_session
from wire.control import AdminStatus, LearnerReport

_FREE_PORTS = ("pool=[{id='engine-0', port=0}]", "gateway.port=0", "gateway.admin_port=0")
_START_DEADLINE_S = 900.0
_STOP_DEADLINE_S = 60.0
_POLL_S = 0.5
_TAIL_LINES = 40
OUR_PARTS = ("--worker-cls", "--weight-transfer-config")
SPECULATION = ("--speculative-config",)


class SystemUnderTestError(Exception):
    """The system under measurement did not start, or does not do what it must for a measurement."""


@dataclass
class Answer:
    """What the admin API said."""

    status: int
    body: dict[str, Any]

    @property
    def reason(self) -> str:
        error = self.body.get("error")
        return str(error.get("message", "")) if isinstance(error, dict) else ""


class System:
    """Handle of a running system."""

    def __init__(self, state_dir: Path, description: dict[str, Any]) -> None:
        self.state_dir = state_dir
        self.url = str(description["gateway_url"])
        self.admin_url = str(description["admin_url"])
        self.model = Path(description["target_dir"]).name
        self._token = (state_dir / "run" / "operator.token").read_text().strip()

    def process_id(self, name: str) -> int | None:
        """The current pid of a role; None while it is down."""
        description = json.loads((self.state_dir / "run" / "system.json").read_text())
        pid = description["processes"][name]["pid"]
        return None if pid is None else int(pid)

    async def admin(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Answer:
        """Call the admin API; the path goes out exactly as given."""
        async with (
            new_session(1) as session,
            session.request(
                method,
                URL(self.admin_url + path, encoded=True),
                json=None if body is None else dict(body),
                headers={"Authorization": f"Bearer {self._token}"},
            ) as response,
        ):
            try:
                content = json.loads(await response.text())
            except ValueError:
                content = {}
            return Answer(response.status, content if isinstance(content, dict) else {"data": content})

    async def must(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Call the admin API and insist on success."""
        answer = await self.admin(method, path, body)
        if answer.status >= 300:
            raise SystemUnderTestError(f"{method} {path}: {answer.status} {answer.reason}")
        return answer.body

    async def status(self) -> AdminStatus:
        return msgspec.convert(await self.must("GET", "/admin/status"), AdminStatus)

    async def learner_report(
        self, accept: Callable[[LearnerReport], bool] = lambda _report: True, *, within_s: float = 120.0
    ) -> LearnerReport:
        """Wait for a report of a living learner that is acceptable."""
        deadline_s = time.monotonic() + within_s
        while True:
            view = (await self.status()).learner
            if view.alive and view.report is not None and accept(view.report):
                return view.report
            if time.monotonic() > deadline_s:
                raise SystemUnderTestError(f"the learner did not get there within {within_s:.0f} s: {view}")
            await asyncio.sleep(1.0)

    async def metrics(self) -> str:
        async with new_session(1) as session, session.get(f"{self.url}/metrics") as response:
            response.raise_for_status()
            return await response.text()


@asynccontextmanager
async def running_system(up_arguments: Sequence[str], settings: Sequence[str] = ()) -> AsyncIterator[System]:
    """Start a system, yield it when it is ready, stop it. Its state directory is temporary."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as directory:
        state_dir = Path(directory) / "state"
        words = [*up_arguments]
        for setting in (*settings, *_FREE_PORTS, f"state.dir={state_dir}"):
            words += ["--set", setting]
        output = Path(directory) / "up.log"
        with output.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "launch.cli", "up", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            yield System(state_dir, await _until_ready(process, state_dir / "run" / "system.json", output))
        finally:
            await _stop(process)


@asynccontextmanager
async def lone_engine(
    up_arguments: Sequence[str], settings: Sequence[str] = (), *, without: Sequence[str] = ()
) -> AsyncIterator[str]:
    """One engine as planned, without gateway and learner; yields its URL. Options in `without` are left out.

    Without `OUR_PARTS` it is stock vLLM, without `SPECULATION` too it is stock vLLM without speculation.
    """
    words = [*up_arguments]
    for setting in (*settings, *_FREE_PORTS):
        words += ["--set", setting]
    planned = subprocess.run(
        [sys.executable, "-m", "launch.cli", "plan", "--json", *words], capture_output=True, text=True, check=True
    )
    plan = json.loads(planned.stdout)
    spec = next(spec for spec in plan["processes"] if spec["role"] == "engine")
    argv = without_options(spec["argv"], without)
    env = os.environ | spec["env"] | {"PACELINE_ENGINE_TOKEN": "lone-engine"}
    if without:
        env["VLLM_PLUGINS"] = ""
    url = plan["engines"][0]["url"]
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as directory:
        output = Path(directory) / "engine.log"
        with output.open("wb") as log:
            process = subprocess.Popen(
                argv, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            await _until_healthy(process, f"{url}/health", output)
            yield url
        finally:
            await _stop(process)


def make_draft(up_arguments: Sequence[str], settings: Sequence[str]) -> None:
    """A random draft in the settings' state directory, made active as `up` does."""
    words = [*up_arguments]
    for setting in settings:
        words += ["--set", setting]
    subprocess.run([sys.executable, "-m", "launch.cli", "draft", "init", *words], check=True, capture_output=True)


async def served_model(url: str) -> str:
    """The model name an engine goes by."""
    async with new_session(1) as session, session.get(f"{url}/v1/models") as response:
        response.raise_for_status()
        return str((await response.json())["data"][0]["id"])


def without_options(argv: Sequence[str], names: Sequence[str]) -> list[str]:
    """A command line less some options and their one value each."""
    kept: list[str] = []
    skip_value = False
    for word in argv:
        if word in names:
            skip_value = True
        elif skip_value:
            skip_value = False
        else:
            kept.append(word)
    return kept


async def _until_ready(process: subprocess.Popen[bytes], system_file: Path, output: Path) -> dict[str, Any]:
    deadline_s = time.monotonic() + _START_DEADLINE_S
    while True:
        _check_alive(process, output, deadline_s)
        if system_file.is_file():
            description: dict[str, Any] = json.loads(system_file.read_text())
            if description["is_ready"]:
                return description
        await asyncio.sleep(_POLL_S)


async def _until_healthy(process: subprocess.Popen[bytes], url: str, output: Path) -> None:
    deadline_s = time.monotonic() + _START_DEADLINE_S
    async with new_session(1) as session:
        while True:
            _check_alive(process, output, deadline_s)
            try:
                async with session.get(url) as response:
                    if response.status == 200:
                        return
            except (aiohttp.ClientError, OSError):
                pass
            await asyncio.sleep(_POLL_S)


def _check_alive(process: subprocess.Popen[bytes], output: Path, deadline_s: float) -> None:
    if process.poll() is None and time.monotonic() < deadline_s:
        return
    tail = "\n".join(output.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
    what = "was not ready in time" if process.poll() is None else f"ended with code {process.returncode}"
    raise SystemUnderTestError(f"{' '.join(map(str, process.args[1:4]))} {what}:\n{tail}")  # type: ignore[index]


async def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
    try:
        await asyncio.to_thread(process.wait, _STOP_DEADLINE_S)
    except subprocess.TimeoutExpired:
        if os.getpgid(process.pid) == process.pid:
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()
