"""A real system for measurements: `paceline up` in a state directory of its own, on free ports, stopped at the end.

Also stock engines: without speculation for reference outputs, without our parts to price them.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec
from yarl import URL

from loadtest.client import new_session
from loadtest.processes import POLL_S, START_DEADLINE_S, SystemUnderTestError, check_alive, running_process, stop
from wire.control import AdminStatus, EngineView, LearnerReport
from wire.environment import ENGINE_TOKEN_VARIABLE

_FREE_PORTS = ("gateway.port=0", "gateway.admin_port=0")
Value = TypeVar("Value")
OUR_PARTS = ("--worker-cls", "--weight-transfer-config")
_PER_REQUEST = "--per-request-spec-decode-metrics"
SPECULATION = ("--speculative-config", _PER_REQUEST)
"""Without the first vLLM refuses the second."""
_ASKS_PER_REQUEST = "engine.per_request_spec_decode_metrics=detailed"
LONE_ENGINE_TOKEN = "lone-engine"
"""Opens the private routes of an engine started alone."""


@dataclass(frozen=True)
class Pool:
    """One engine replica of a system under measurement."""

    id: str
    kind: str = "combined"


ONE_ENGINE = (Pool("engine-0"),)


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

    def __init__(self, state_dir: Path, description: dict[str, Any], engine_token: str) -> None:
        self.state_dir = state_dir
        self.engine_token = engine_token
        """Opens the engines' private routes, for a second gateway in front of them."""
        self.url = str(description["gateway_url"])
        self.admin_url = str(description["admin_url"])
        self.model = Path(description["target_dir"]).name
        self._token = (state_dir / "run" / "operator.token").read_text().strip()

    def process_id(self, name: str) -> int | None:
        """The current pid of a process; None while it is down."""
        pid = self._processes()[name]["pid"]
        return None if pid is None else int(pid)

    def process_names(self) -> list[str]:
        """Every process the supervisor watches, in start order."""
        return list(self._processes())

    def gateway_config(self) -> dict[str, Any]:
        """The gateway's resolved configuration, for a second one in front of the same engines."""
        config: dict[str, Any] = json.loads((self.state_dir / "run" / "gateway.json").read_text())
        return config

    def _processes(self) -> dict[str, dict[str, Any]]:
        description = json.loads((self.state_dir / "run" / "system.json").read_text())
        return dict(description["processes"])

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

    async def engine(self, engine_id: str) -> EngineView:
        """One engine as the gateway sees it."""
        found = [view for view in (await self.status()).engines if view.id == engine_id]
        if not found:
            raise SystemUnderTestError(f"the gateway knows no engine {engine_id!r}")
        return found[0]

    async def until(self, is_there: Callable[[AdminStatus], bool], what: str, *, within_s: float) -> float:
        """Wait until the gateway's status is as wanted, through outages of the gateway itself; returns the seconds it took."""
        started_at_s = time.monotonic()
        while True:
            try:
                if is_there(await self.status()):
                    return time.monotonic() - started_at_s
            except (aiohttp.ClientError, OSError, SystemUnderTestError):
                pass
            if time.monotonic() - started_at_s > within_s:
                raise SystemUnderTestError(f"{what}: not so after {within_s:.0f} s")
            await asyncio.sleep(POLL_S)

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

    async def read_metrics(self, read: Callable[[str], Value], *, within_s: float = 30.0) -> Value:
        """What `read` finds on the metrics page.

        An engine that is slow to answer is left out of one page or another, so where `read` raises SystemUnderTestError it is
        given the next page; its last error is raised after `within_s`.
        """
        deadline_s = time.monotonic() + within_s
        while True:
            try:
                return read(await self.metrics())
            except SystemUnderTestError:
                if time.monotonic() > deadline_s:
                    raise
            await asyncio.sleep(POLL_S)

    async def metrics(self) -> str:
        async with new_session(1) as session, session.get(f"{self.url}/metrics") as response:
            response.raise_for_status()
            return await response.text()


@asynccontextmanager
async def running_system(
    up_arguments: Sequence[str], settings: Sequence[str] = (), *, pools: Sequence[Pool] = ONE_ENGINE
) -> AsyncIterator[System]:
    """Start a system, yield it when every engine is ready, stop it. Its state directory is temporary.

    Its engines tell for each request what was accepted in each verify step, unless a `--set` word says otherwise.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as directory:
        state_dir = Path(directory) / "state"
        words = up_words(up_arguments, (*settings, *_FREE_PORTS, pool_setting(pools), f"state.dir={state_dir}"))
        engine_token = secrets.token_urlsafe(24)
        output = Path(directory) / "up.log"
        with output.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "launch.cli", "up", *words],
                env=os.environ | {ENGINE_TOKEN_VARIABLE: engine_token},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            description = await _until_ready(process, state_dir / "run" / "system.json", output)
            system = System(state_dir, description, engine_token)
            await system.until(
                lambda status: all(engine.ready for engine in status.engines), "every engine is ready", within_s=60
            )
            yield system
        finally:
            await stop(process)


@asynccontextmanager
async def lone_engine(
    up_arguments: Sequence[str],
    settings: Sequence[str] = (),
    *,
    without: Sequence[str] = (),
    adding: Sequence[str] = (),
) -> AsyncIterator[str]:
    """One engine as planned, without gateway and learner; yields its URL. Options in `without` are left out, then `adding` comes.

    Without `OUR_PARTS` it is stock vLLM, without `SPECULATION` too it is stock vLLM without speculation.
    """
    plan = planned(up_arguments, settings)
    spec = next(spec for spec in plan["processes"] if spec["role"] == "engine")
    argv = [*without_options(spec["argv"], without), *adding]
    env = os.environ | spec["env"] | {ENGINE_TOKEN_VARIABLE: LONE_ENGINE_TOKEN}
    if without:
        env["VLLM_PLUGINS"] = ""
    url = plan["engines"][0]["url"]
    async with running_process(argv, ready_url=f"{url}/health", environment=env):
        yield url


def planned(up_arguments: Sequence[str], settings: Sequence[str] = (), *, pools: Sequence[Pool] = ONE_ENGINE) -> dict[str, Any]:
    """What `paceline plan --json` says of these settings on free ports; raises SystemUnderTestError."""
    words = _words(up_arguments, (*settings, *_FREE_PORTS, pool_setting(pools)))
    plan: dict[str, Any] = json.loads(_paceline("plan", "--json", *words))
    return plan


def pool_setting(pools: Sequence[Pool]) -> str:
    """The `--set` word that asks for these engines, on free ports."""
    return "pool=[" + ", ".join(f"{{id={pool.id!r}, kind={pool.kind!r}, port=0}}" for pool in pools) + "]"


def up_words(up_arguments: Sequence[str], settings: Sequence[str]) -> list[str]:
    """Words of `paceline up`; later ones win. What requests tell of their verify steps is counted anyway, and sent at their end."""
    return _words(("--set", _ASKS_PER_REQUEST, *up_arguments), settings)


def speculating(method: Mapping[str, object]) -> tuple[str, ...]:
    """Options of `vllm serve` for this speculation, told for each request as `running_system` has it."""
    return (SPECULATION[0], json.dumps(method), _PER_REQUEST, "detailed")


def _words(up_arguments: Sequence[str], settings: Sequence[str]) -> list[str]:
    return [*up_arguments, *(word for setting in settings for word in ("--set", setting))]


def make_draft(up_arguments: Sequence[str], settings: Sequence[str]) -> None:
    """A random draft in the settings' state directory, made active as `up` does; raises SystemUnderTestError."""
    _paceline("draft", "init", *_words(up_arguments, settings))


def export_draft(state_dir: Path, version: int, directory: Path) -> None:
    """The version as a checkpoint that `draft.checkpoint` takes; raises SystemUnderTestError."""
    _paceline("draft", "export", str(version), str(directory), "--set", f"state.dir={state_dir}")


def _paceline(*words: str) -> str:
    """What a command of ours prints; raises SystemUnderTestError where it fails."""
    answer = subprocess.run([sys.executable, "-m", "launch.cli", *words], capture_output=True, text=True)
    if answer.returncode:
        raise SystemUnderTestError(f"paceline {words[0]} ended with code {answer.returncode}: {answer.stderr.strip()}")
    return answer.stdout


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
    deadline_s = time.monotonic() + START_DEADLINE_S
    while True:
        check_alive(process, output, deadline_s)
        if system_file.is_file():
            description: dict[str, Any] = json.loads(system_file.read_text())
            if description["is_ready"]:
                return description
        await asyncio.sleep(POLL_S)
