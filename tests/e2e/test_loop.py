"""The whole loop from one command, judged by metrics: traffic, capture, learning, gate, swap, a learner's death, a clean end."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from loadtest.bars.learning import heldout_al
from loadtest.bars.load import background_load
from loadtest.client import new_session
from loadtest.closed_loop import run_batch
from loadtest.sources import human_eval
from loadtest.system import System, running_system
from wire.control import AdminStatus

README = Path(__file__).parents[2] / "README.md"
EAGER = ["--config", str(Path(__file__).parents[2] / "configs" / "eager.toml")]
# The gate asks for little and the learner gives no way: what is tested is the loop, not how sure or how polite it is.
FAST = [
    "learner.gate.every_s=10.0",
    "learner.gate.confidence=0.6",
    "learner.nice=0",
    "learner.checkpoint_every_s=5.0",
    "canary.min_verify_steps=50",
]
LEARN_WITHIN_S = 1200.0
MIN_RISE = 0.1


@pytest.mark.timeout(3600)
def test_the_loop_closes() -> None:
    asyncio.run(the_loop())


async def the_loop() -> None:
    source = human_eval.load()
    async with running_system(EAGER, FAST) as system:
        children = [psutil.Process(pid) for name in ("engine-0", "gateway", "learner") if (pid := system.process_id(name))]
        assert len(children) == 3
        first = await heldout_al(system, source.heldout[:6])
        assert first is not None
        async with background_load(system, source.train, concurrency=4) as load:
            status = await until(system, lambda status: committed(status) >= 1, within_s=LEARN_WITHIN_S)
            await the_learner_dies_and_resumes(system)
            status = await until(system, lambda status: committed(status) >= 2, within_s=LEARN_WITHIN_S)
        assert load.results
        assert not load.failed, load.reasons()
        last = await heldout_al(system, source.heldout[:6])
        assert last is not None
        assert last >= first + MIN_RISE, (first, last)
        await responses_name_their_versions(system, status)
        await the_metrics_tell_the_story(system)
        await the_readme_example_prints_verify_steps(system)
    for child in children:
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


async def the_learner_dies_and_resumes(system: System) -> None:
    before = await system.learner_report(lambda report: report.num_steps > 0, within_s=300.0)
    checkpoint, reported_at_ns = system.state_dir / "learner" / "checkpoint.safetensors", time.time_ns()
    async with asyncio.timeout(300.0):  # one that was begun and ended later holds at least those steps
        for _ in range(2):
            while not (checkpoint.exists() and checkpoint.stat().st_mtime_ns > reported_at_ns):
                await asyncio.sleep(0.5)
            reported_at_ns = checkpoint.stat().st_mtime_ns
    pid = system.process_id("learner")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    killed_at_s = time.time()
    after = await system.learner_report(
        lambda report: report.sent_at_s > killed_at_s + 1.0 and report.num_steps > 0, within_s=300.0
    )
    assert after.num_steps >= before.num_steps
    assert after.buffer_tokens > 0


async def responses_name_their_versions(system: System, status: AdminStatus) -> None:
    body = {"model": system.model, "messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 4}
    headers = {"X-Request-Id": "e2e-versions"}
    async with (
        new_session(1) as session,
        session.post(f"{system.url}/v1/chat/completions", json=body, headers=headers) as response,
    ):
        assert response.status == 200
        assert response.headers["X-Request-Id"] == "e2e-versions"
        assert int(response.headers["X-Paceline-Draft-Version"]) >= 1
        assert response.headers["X-Paceline-Target-Version"].isdecimal()
    assert status.active_version is not None
    assert status.active_version >= 1


async def the_metrics_tell_the_story(system: System) -> None:
    text = await system.metrics()
    for name in (
        "paceline_acceptance_length",
        "paceline_captured_rows_total",
        "paceline_learner_steps",
        "paceline_learner_loss",
        "paceline_swaps_total",
        "paceline_gate_decisions",
        "vllm:num_requests_running",
    ):
        assert name in text, name
    assert 'engine="engine-0"' in text


async def the_readme_example_prints_verify_steps(system: System) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (example,) = [block for block in blocks if "zmq.SUB" in block]
    home = os.environ | {"PACELINE_HOME": str(system.state_dir.parent)}
    process = subprocess.Popen([sys.executable, "-u", "-c", example], env=home, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        reading = asyncio.create_task(asyncio.to_thread(process.stdout.readline))
        async with asyncio.timeout(300.0):
            while not reading.done():  # a subscriber sees what is sent after it joined
                await run_batch(system.url, system.model, human_eval.load().train[:1], concurrency=1, options={"max_tokens": 8})
            line = await reading
    finally:
        process.kill()
    assert "proposed" in line
    assert "accepted" in line


def committed(status: AdminStatus) -> int:
    return sum(swap.outcome == "committed" for swap in status.swaps)


async def until(system: System, accept: Callable[[AdminStatus], bool], *, within_s: float) -> AdminStatus:
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        status = await system.status()
        if accept(status):
            return status
        await asyncio.sleep(1.0)
    raise AssertionError(f"not within {within_s:.0f} s: {status}")
