"""The load tester measures itself: `paceline bench run` on one core, a server of canned answers on another."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil

from loadtest.bars.load import progress
from loadtest.bars.registry import Bench, Measured
from loadtest.processes import SystemUnderTestError, running_process, stop
from loadtest.records import REQUESTS_FILE, RUN_FILE, RequestRecord, RunRecord
from loadtest.run.output import as_toml
from loadtest.scenario import Scenario
from wire.ports import free_ports

NUM_REQUESTS = 100_000
"""So many at least in the run whose memory is watched."""
_WATCH_EVERY_S = 0.5
_MIB = 1 << 20


@dataclass
class Usage:
    """What one run of the load tester used."""

    rss_mib: list[float] = field(default_factory=list)
    """Resident memory while requests were sent, at equal distances in time."""
    cpu_s: float = 0.0
    """Of the whole process, its start included."""
    waited_s: float = 0.0
    """For its core, because others had it: where that is much, the machine was measured and not the load tester."""


@dataclass
class Trial:
    """One run of the load tester."""

    run: RunRecord
    path: Path
    """Of its requests."""
    usage: Usage

    def requests(self) -> Iterator[RequestRecord]:
        decoder = msgspec.json.Decoder(RequestRecord)
        with self.path.open("rb") as lines:
            yield from map(decoder.decode, lines)


async def requests_per_s(_bench: Bench) -> dict[str, Measured]:
    """Short answers, one after the other at a fixed concurrency, as many as the client can take."""
    scenario = _scenario({"kind": "closed", "concurrency": 64}, duration_s=70.0, warm_up_s=5.0, max_tokens=4)
    async with _tried(scenario, between_tokens_s=0.0) as trial:
        per_s = sum(scenario.cut.warm_up_s <= one.ended_at_s < scenario.duration_s for one in trial.requests()) / (
            scenario.duration_s - scenario.cut.warm_up_s
        )
        detail = _detail(trial)
        progress(f"{per_s:.0f} requests/s")
        return {"requests_per_s": Measured(per_s, detail), "memory_growth_mib": growth(trial, detail)}


def growth(trial: Trial, detail: dict[str, Any]) -> Measured:
    """Highest memory in the last tenth of the run less the highest before a fifth of it had gone by."""
    count = sum(trial.run.num_requests.values())
    if count < NUM_REQUESTS:
        return Measured(None, {"reason": f"{count} requests were sent, {NUM_REQUESTS} are wanted", **detail})
    rss_mib = trial.usage.rss_mib
    early, late = max(rss_mib[: len(rss_mib) // 5]), max(rss_mib[-(len(rss_mib) // 10) :])
    return Measured(late - early, {"early_mib": round(early, 1), "late_mib": round(late, 1), **detail})


async def chunks_per_s(_bench: Bench) -> dict[str, Measured]:
    """Long answers whose chunks come one by one."""
    scenario = _scenario({"kind": "closed", "concurrency": 700}, duration_s=30.0, warm_up_s=6.0, max_tokens=200)
    async with _tried(scenario, between_tokens_s=0.02) as trial:
        start_s, end_s = scenario.cut.warm_up_s, scenario.duration_s
        count = sum(start_s <= time_s < end_s for one in trial.requests() for time_s in one.chunk_times_s)
        per_s = count / (end_s - start_s)
        progress(f"{per_s:.0f} chunks/s")
        return {"chunks_per_s": Measured(per_s, _detail(trial))}


async def dispatch_lag(_bench: Bench) -> dict[str, Measured]:
    """500 requests a second by an open schedule."""
    scenario = _scenario({"kind": "poisson", "rate_per_s": 500}, duration_s=35.0, warm_up_s=3.0, max_tokens=8)
    async with _tried(scenario, between_tokens_s=0.01) as trial:
        lag = trial.run.dispatch_lag_ms
        progress(f"dispatch lag {lag}")
        return {"dispatch_lag_p99_ms": Measured(lag["p99"], {"lag_ms": lag, **_detail(trial)})}


def _scenario(arrivals: dict[str, Any], *, duration_s: float, warm_up_s: float, max_tokens: int) -> Scenario:
    phase = {"name": "all", "duration_s": duration_s, "arrivals": arrivals, "traffic": {"human_eval": 1}}
    lane = {"name": "all", "phase": [phase], "max_tokens": max_tokens}
    named = {"name": "harness", "what": "The load tester's own speed.", "cut": {"warm_up_s": warm_up_s}}
    # It is the load tester that is measured: its limits are the result.
    limits = {"max_dispatch_lag_p99_ms": 60_000.0, "max_busy_share": 100.0}
    return Scenario.build({**named, "lane": [lane], **limits}, source="the harness bar")


@asynccontextmanager
async def _tried(scenario: Scenario, *, between_tokens_s: float) -> AsyncIterator[Trial]:
    """Run a scenario against canned answers; yields what came out, whose files are there while the block runs.

    Raises SystemUnderTestError where a request failed, because the speed of failing is no speed.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemUnderTestError("the load tester and the server it asks need a core each; this machine gives one")
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    server_argv = [
        sys.executable,
        "-m",
        "loadtest.canned_server",
        "--port",
        str(port),
        "--between-tokens-s",
        str(between_tokens_s),
    ]
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as directory:
        root = Path(directory)
        (root / "scenario.toml").write_text(as_toml(scenario))
        words = ["bench", "run", str(root / "scenario.toml"), "--url", url, "--out", str(root / "out")]
        async with running_process(server_argv, ready_url=f"{url}/v1/models") as server:
            os.sched_setaffinity(server.pid, {cores[-1]})
            process = subprocess.Popen(
                [sys.executable, "-m", "launch.cli", *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                preexec_fn=lambda: os.sched_setaffinity(0, {cores[0]}),
            )
            usage = Usage()
            try:
                await _watch(process, root / "out" / REQUESTS_FILE, usage)
            finally:
                await stop(process)
        yield _read(process, root / "out", usage)


async def _watch(process: subprocess.Popen[bytes], requests: Path, usage: Usage) -> None:
    """Until the process ends; its memory from the first written requests on."""
    watched = psutil.Process(process.pid)
    while process.poll() is None:
        await asyncio.sleep(_WATCH_EVERY_S)
        # It may end at any moment, and then has no times, no memory and no file of them.
        with suppress(psutil.Error, OSError):
            if requests.is_file() and requests.stat().st_size:
                usage.rss_mib.append(watched.memory_info().rss / _MIB)
            waited_ns = int(Path(f"/proc/{process.pid}/schedstat").read_text().split()[1])
            times = watched.cpu_times()
            usage.cpu_s, usage.waited_s = times.user + times.system, waited_ns / 1e9


def _read(process: subprocess.Popen[bytes], out_dir: Path, usage: Usage) -> Trial:
    if process.returncode:
        assert process.stderr is not None
        raise SystemUnderTestError(f"bench run ended with code {process.returncode}: {process.stderr.read().decode()[-2000:]}")
    run = msgspec.json.decode((out_dir / RUN_FILE).read_bytes(), type=RunRecord)
    if set(run.num_requests) != {"ok"}:
        raise SystemUnderTestError(f"requests failed: {run.num_requests}")
    return Trial(run, out_dir / REQUESTS_FILE, usage)


def _detail(trial: Trial) -> dict[str, Any]:
    """What shows whether the client or its machine was the limit."""
    duration_s = trial.run.duration_s or 0.0
    return {
        "num_requests": sum(trial.run.num_requests.values()),
        "duration_s": round(duration_s, 1),
        "client_cpu_s": round(trial.usage.cpu_s, 1),
        "client_waited_for_its_core_s": round(trial.usage.waited_s, 1),
        "highest_rss_mib": round(max(trial.usage.rss_mib, default=0.0), 1),
    }
