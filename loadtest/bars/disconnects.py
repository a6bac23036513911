"""Clients that leave: 200 of them at seeded moments, and what of their requests is still held afterwards."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from loadtest.bars.drill import ONE_DECODE, SETTINGS
from loadtest.bars.load import progress
from loadtest.bars.registry import Bench, Measured
from loadtest.client import StreamResult, new_session, stream_chat
from loadtest.closed_loop import run_batch
from loadtest.exposition import parse, total
from loadtest.processes import SystemUnderTestError
from loadtest.sources import human_eval
from loadtest.system import System, running_system
from loadtest.traffic import Prompt

NUM_DISCONNECTS = 200
CONCURRENCY = 8
LEASE_S = 20.0
"""Of KV blocks that wait to be fetched, as the plan sets it."""
SLACK_S = 15.0
"""For the last heartbeats and the scrapes."""
POLL_S = 1.0
OPTIONS: dict[str, Any] = {"max_tokens": 96, "temperature": 0.0, "ignore_eos": True}
WHOLE_ANSWER: dict[str, Any] = {"stream": False, "stream_options": None}
"""Every fourth client waits for its answer in one piece; its disconnect takes another way through the server."""
LEASES = "paceline_kv_leases_total"
KV_USAGE = "vllm:kv_cache_usage_perc"
COUNTERS = {
    "requests in the gateway": "paceline_requests_in_flight",
    "requests the gateway has on engines": "paceline_engine_requests_in_flight",
    "prefilled KV under lease": "paceline_kv_leases_held",
    "running in engines": "vllm:num_requests_running",
    "waiting in engines": "vllm:num_requests_waiting",
}
"""What must be 0 at rest, by what it counts."""
_USAGE_SLACK = 1e-6


@dataclass(frozen=True)
class Held:
    """What the system holds at one moment."""

    counts: Mapping[str, float]
    usage: Mapping[str, float]
    """Share of KV blocks in use by engine."""

    def leaks(self, base: Held) -> dict[str, float]:
        """What is held beyond the state at rest; empty where all is well."""
        found = {what: count for what, count in self.counts.items() if count}
        for engine, share in self.usage.items():
            if share > base.usage.get(engine, 0.0) + _USAGE_SLACK:
                found[f"share of KV blocks above the base in {engine}"] = share - base.usage.get(engine, 0.0)
        return found


async def leaks(bench: Bench) -> dict[str, Measured]:
    """Disconnects over a prefill and a decode engine, so that both legs of a request are cut at some time."""
    prompts = human_eval.load().train
    async with running_system(bench.up_arguments, ("learner.enabled=false", *SETTINGS), pools=ONE_DECODE) as system:
        warm_up = await run_batch(system.url, system.model, prompts[:CONCURRENCY], concurrency=CONCURRENCY, options=OPTIONS)
        base = await at_rest(system)
        longest_s = max(result.ended_at_s - result.sent_at_s for result in warm_up)
        num_cut = await leave(system.url, system.model, prompts, longest_s=longest_s)
        progress(f"{num_cut} clients left")
        left, after_s = await until_clean(system, base)
        ends = await system.read_metrics(lease_ends)
        afterwards = await run_batch(system.url, system.model, prompts[:CONCURRENCY], concurrency=CONCURRENCY, options=OPTIONS)
    failed = sum(not result.is_ok for result in (*warm_up, *afterwards))
    detail = {
        "disconnects": num_cut,
        "still_held": left,
        "clean_after_s": round(after_s, 1),
        "leases": ends,
        "failed_before_and_after": failed,
    }
    if failed:
        return {"disconnect_leaks": Measured(None, {"reason": "requests nobody left failed", **detail})}
    if not ends.get("released"):
        return {"disconnect_leaks": Measured(None, {"reason": "no client left between the two legs of its request", **detail})}
    return {"disconnect_leaks": Measured(len(left), detail)}


async def leave(
    url: str, model: str, prompts: Sequence[Prompt], *, longest_s: float, number: int = NUM_DISCONNECTS, seed: int = 0
) -> int:
    """Have that many clients leave before their answer is whole; returns how many requests were cut."""
    draw = random.Random(seed)
    num_cut = 0
    num_begun = 0

    async def client(session: aiohttp.ClientSession) -> None:
        nonlocal num_cut, num_begun
        while num_cut < number:
            index, patience_s = num_begun, draw.uniform(0.0, longest_s)
            num_begun += 1
            # A salt of its own: every prompt has to be prefilled, and some of them remotely.
            options = OPTIONS | {"cache_salt": f"leaves-{index}"} | (WHOLE_ANSWER if index % 4 == 3 else {})
            if await is_cut(session, url, model, prompts[index % len(prompts)], options=options, patience_s=patience_s):
                num_cut += 1

    async with new_session(CONCURRENCY) as session:
        await asyncio.gather(*(client(session) for _ in range(CONCURRENCY)))
    return num_cut


async def is_cut(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    prompt: Prompt,
    *,
    options: Mapping[str, Any],
    patience_s: float,
) -> bool:
    """Ask, and close the connection after a while; False where the answer was whole before."""
    asking: asyncio.Task[StreamResult] = asyncio.create_task(stream_chat(session, url, model, prompt, options=options))
    done, _ = await asyncio.wait({asking}, timeout=patience_s)
    if done:
        return False
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    return True


async def at_rest(system: System) -> Held:
    """What is held with no client there; raises SystemUnderTestError where it does not come to rest."""
    left, _ = await until_clean(system, Held({}, dict.fromkeys((await system.read_metrics(read_held)).usage, 1.0)))
    if left:
        raise SystemUnderTestError(f"the system does not come to rest after its first requests: {left}")
    return await system.read_metrics(read_held)


async def until_clean(system: System, base: Held) -> tuple[dict[str, float], float]:
    """Wait as long as a lease lasts; returns what is still held then, and the seconds it took."""
    started_at_s = time.monotonic()
    while True:
        left = (await system.read_metrics(read_held)).leaks(base)
        elapsed_s = time.monotonic() - started_at_s
        if not left or elapsed_s > LEASE_S + SLACK_S:
            return left, elapsed_s
        await asyncio.sleep(POLL_S)


def lease_ends(metrics: str) -> dict[str, float]:
    """How many holds on prefilled KV ended in each way, by its name."""
    return {sample.labels["end"]: sample.value for sample in parse(metrics) if sample.name == LEASES}


def read_held(metrics: str) -> Held:
    """From a metrics page; raises SystemUnderTestError where it lacks something, because that would count as clean."""
    counts = {what: total(metrics, name) for what, name in COUNTERS.items()}
    usage = {sample.labels.get("engine", ""): sample.value for sample in parse(metrics) if sample.name == KV_USAGE}
    missing = [COUNTERS[what] for what, count in counts.items() if count is None] + [KV_USAGE] * (not usage)
    if missing:
        raise SystemUnderTestError(f"the metrics page lacks {', '.join(missing)}")
    return Held({what: count for what, count in counts.items() if count is not None}, usage)
