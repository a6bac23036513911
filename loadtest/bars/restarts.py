"""A rolling restart under load: every engine in turn drained, stopped, started and taken back, without one failed request."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Mapping

from loadtest.bars.drill import (
    BACK_WITHIN_S,
    CONCURRENCY,
    NUM_PROMPTS,
    SETTINGS,
    TWO_DECODE,
    calm,
    differing,
    undisturbed,
    unlike,
)
from loadtest.bars.load import Load, background_load, progress
from loadtest.bars.registry import Bench, Measured
from loadtest.processes import POLL_S, SystemUnderTestError
from loadtest.sources import human_eval
from loadtest.system import System, running_system
from wire.control import AdminStatus

DRAINED_WITHIN_S = 240.0
"""For the longest answer in flight, and the lease of KV that a decode engine may still fetch."""


async def rolling(bench: Bench) -> dict[str, Measured]:
    """Every engine of a system with one prefill and two decode replicas."""
    prompts = human_eval.load().train[:NUM_PROMPTS]
    steps: dict[str, str] = {}
    async with running_system(bench.up_arguments, ("learner.enabled=false", *SETTINGS), pools=TWO_DECODE) as system:
        reference = await undisturbed(system, prompts)
        async with background_load(system, prompts, concurrency=CONCURRENCY, options=unlike) as load:
            for pool in TWO_DECODE:
                await calm(system, load)
                steps[pool.id] = await restart(system, pool.id)
                progress(f"{pool.id}: {steps[pool.id]}; {len(load.failed)} of {len(load.results)} requests failed so far")
    return {"rolling_restart_failed": value(load, steps, reference)}


async def restart(system: System, engine_id: str) -> str:
    """Drain an engine, end it, wait for the new one, take it back; returns how long it took, in words."""
    epoch = (await system.engine(engine_id)).engine_epoch
    drained_s = await drain(system, engine_id)
    pid = system.process_id(engine_id)
    if pid is None:
        raise SystemUnderTestError(f"{engine_id} is down while it drains")
    started_at_s = time.monotonic()
    os.kill(pid, signal.SIGTERM)

    def is_back(status: AdminStatus) -> bool:
        return any(view.id == engine_id and view.ready and view.engine_epoch != epoch for view in status.engines)

    await system.until(is_back, f"{engine_id} is back after its restart", within_s=BACK_WITHIN_S)
    await system.must("POST", f"/admin/engines/{engine_id}/undrain")
    return f"drained in {drained_s:.1f} s, back after {time.monotonic() - started_at_s:.1f} s"


async def drain(system: System, engine_id: str) -> float:
    """Seconds until the engine had nothing left to do; raises SystemUnderTestError where that takes too long."""
    started_at_s = time.monotonic()
    while not (await system.must("POST", f"/admin/engines/{engine_id}/drain"))["is_drained"]:
        if time.monotonic() - started_at_s > DRAINED_WITHIN_S:
            raise SystemUnderTestError(f"{engine_id} is not drained after {DRAINED_WITHIN_S:.0f} s")
        await asyncio.sleep(POLL_S)
    return time.monotonic() - started_at_s


def value(load: Load, steps: Mapping[str, str], reference: Mapping[str, str]) -> Measured:
    """Requests that failed or were answered otherwise than undisturbed."""
    other = differing(load.results, reference)
    detail = {
        "restarts": dict(steps),
        "requests": len(load.results),
        "failed": len(load.failed),
        "reasons": load.reasons(),
        "answered_otherwise": other[:5],
    }
    if not load.results:
        return Measured(None, {"reason": "no request was made", **detail})
    return Measured(len(load.failed) + len(other), detail)
