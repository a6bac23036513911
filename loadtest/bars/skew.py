"""What a draft version skew costs: a decode engine's draft reads, of a prompt, what another version left on the prefill engine.

Both engines are asked directly. The gateway stands still meanwhile, because it would end the skew.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from loadtest.bars.drill import ONE_DECODE
from loadtest.bars.load import background_load, progress
from loadtest.bars.registry import Bench, Measured
from loadtest.client import new_session
from loadtest.exposition import total
from loadtest.processes import SystemUnderTestError
from loadtest.sources import human_eval
from loadtest.system import System, running_system
from loadtest.traffic import Prompt
from wire.control import AdminStatus

SETTINGS = ("engine.enforce_eager=true", "engine.kv_cache_memory_bytes=268435456")
NUM_SWAPS = 3
MIN_AL = 1.6
"""Of the live draft: one that knows little leans little on what the KV of the prompt tells it, so that no skew would show."""
LEARN_AT_MOST_S = 1500.0
CONCURRENCY = 4
NUM_PROMPTS = 24
OPTIONS: dict[str, Any] = {"max_tokens": 96, "temperature": 0.0, "ignore_eos": True}
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
ACCEPTED, DRAFTS = "vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_drafts_total"


@dataclass(frozen=True)
class Pair:
    """The two engines, by their private ports."""

    session: aiohttp.ClientSession
    prefill_url: str
    decode_url: str
    model: str
    token: str

    async def post(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        async with self.session.post(url, json=body, headers={"Authorization": f"Bearer {self.token}"}) as response:
            text = await response.text()
        if response.status != 200:
            raise SystemUnderTestError(f"{url} answered {response.status}: {text[:300]}")
        answer: dict[str, Any] = json.loads(text)
        return answer

    async def put_on_prefill(self, version: int, expected: int) -> None:
        """Swap the prefill engine's draft alone."""
        if version != expected:
            await self.post(f"{self.prefill_url}/paceline/stage", {"version": version})
            await self.post(f"{self.prefill_url}/paceline/commit", {"version": version, "expected_active": expected})

    async def answer(self, prompt: Prompt, salt: str, *, is_pulled: bool) -> None:
        """Have a whole answer made; its prompt is prefilled on the other engine, or where it is decoded."""
        body = {"model": self.model, "messages": list(prompt.messages), "cache_salt": salt, **OPTIONS}
        if is_pulled:
            leg = await self.post(
                f"{self.prefill_url}/v1/chat/completions", body | {"max_tokens": 1, "kv_transfer_params": REMOTE_DECODE}
            )
            body["kv_transfer_params"] = leg["kv_transfer_params"]
        await self.post(f"{self.decode_url}/v1/chat/completions", body)

    async def counts(self) -> tuple[float, float]:
        """Accepted proposals and verify steps of the decode engine so far."""
        async with self.session.get(f"{self.decode_url}/metrics") as response:
            page = await response.text()
        return total(page, ACCEPTED) or 0.0, total(page, DRAFTS) or 0.0


async def al_drop(bench: Bench) -> dict[str, Measured]:
    """Learn until a good draft serves, then answer unseen prompts with every age of draft on the prefill engine.

    The value is the worst skew's: of the draft before the active one, and of the random one, which no skew can exceed.
    """
    source = human_eval.load()
    async with running_system(bench.up_arguments, SETTINGS, pools=ONE_DECODE) as system:
        async with background_load(system, source.train, concurrency=CONCURRENCY):
            await system.until(has_learnt, f"{NUM_SWAPS} drafts were swapped in and AL is {MIN_AL}", within_s=LEARN_AT_MOST_S)
            await system.must("POST", "/admin/learner/pause")
        status = await system.status()
        active, committed = status.active_version, [swap.version for swap in status.swaps if swap.outcome == "committed"]
        older = [version for version in dict.fromkeys(reversed(committed)) if version != active][:1]
        if active is None or not older:
            raise SystemUnderTestError(f"there is no older draft than the active one, {active}")
        async with standing_still(system, "gateway"), engine_pair(system) as pair:
            found = await lengths(pair, source.heldout[:NUM_PROMPTS], active, {"forerunner": older[0], "random": 0})
    same = found["same version"]
    drops = {name: round(100 * (1 - value / same), 2) for name, value in found.items()}
    detail = {
        "al": {name: round(value, 3) for name, value in found.items()},
        "drop_pct": drops,
        "draft": active,
        "before": older[0],
    }
    return {"skew_al_drop_pct": Measured(max(drops["forerunner"], drops["random"]), detail)}


async def lengths(pair: Pair, prompts: Sequence[Prompt], active: int, others: dict[str, int]) -> dict[str, float]:
    """AL by what the prefill engine's draft is."""
    arms: dict[str, tuple[int, bool]] = {"no transfer": (active, False), "same version": (active, True)}
    arms |= {name: (version, True) for name, version in others.items()}
    found: dict[str, float] = {}
    now = active
    for name, (version, is_pulled) in arms.items():
        await pair.put_on_prefill(version, now)
        now = version
        before = await pair.counts()
        for prompt in prompts:
            await pair.answer(prompt, name, is_pulled=is_pulled)
        accepted, drafts = (after - start for after, start in zip(await pair.counts(), before, strict=True))
        found[name] = 1.0 + accepted / drafts
        progress(f"{name}: AL {found[name]:.3f}")
    await pair.put_on_prefill(active, now)
    return found


def has_learnt(status: AdminStatus) -> bool:
    num_swaps = sum(swap.outcome == "committed" for swap in status.swaps)
    return num_swaps >= NUM_SWAPS and status.acceptance is not None and status.acceptance.acceptance_length >= MIN_AL


@asynccontextmanager
async def standing_still(system: System, name: str) -> AsyncIterator[None]:
    pid = system.process_id(name)
    if pid is None:
        raise SystemUnderTestError(f"{name} is down")
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@asynccontextmanager
async def engine_pair(system: System) -> AsyncIterator[Pair]:
    urls = {engine["id"]: str(engine["url"]) for engine in system.gateway_config()["engines"]}
    async with new_session(1) as session:
        yield Pair(session, urls["prefill-0"], urls["decode-0"], system.model, system.engine_token)
