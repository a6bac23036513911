"""The fault drill: SIGKILL of every process in turn, twice, under load, and what clients noticed of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import psutil

from loadtest.bars.load import Load, background_load, progress, reasons
from loadtest.bars.registry import Bench, Measured
from loadtest.client import StreamResult
from loadtest.closed_loop import run_batch
from loadtest.exposition import total
from loadtest.processes import SystemUnderTestError
from loadtest.sources import human_eval
from loadtest.statistics import Interval
from loadtest.system import Pool, System, running_system
from loadtest.traffic import Prompt
from wire.control import AdminStatus

TWO_DECODE = (Pool("prefill-0", "prefill"), Pool("decode-0", "decode"), Pool("decode-1", "decode"))
ONE_DECODE = (Pool("prefill-0", "prefill"), Pool("decode-0", "decode"))
# fp32: on a CPU, bf16 rounds one-row and many-row steps differently, so an answer that goes on elsewhere could differ by that.
# Eager, because every kill is followed by a start of an engine. The cache is small, because three engines share a machine.
SETTINGS = ("engine.enforce_eager=true", "target.dtype=float32", "engine.kv_cache_memory_bytes=268435456")
CONCURRENCY = 8
NUM_PROMPTS = 16
OPTIONS: dict[str, Any] = {"max_tokens": 96, "temperature": 0.0, "ignore_eos": True}
REMOTE_PREFILLS = "paceline_routed_total"
BACK_WITHIN_S = 900.0
"""A start takes some 50 s of processor time, of which two engines under load leave it a quarter of a core."""
_SHOWN_CHARACTERS = 40
"""Of an answer that differs."""
CALM_S = 8.0
"""Before each kill, at the least, so that streams run on every engine again."""

How = Literal["process", "group"]
ROUNDS: tuple[How, ...] = ("process", "group")
"""The first round kills the process that was started and must find its children gone; the second all of them at once."""


@dataclass(frozen=True)
class Kill:
    """One SIGKILL and the time without the process, until it was started again and ready."""

    process: str
    how: How
    outage: Interval
    dead_at_s: float
    """When the process was gone: until then it took requests, and broke them."""

    @property
    def death(self) -> Interval:
        return Interval(self.outage.start_s, self.dead_at_s)

    def shown(self) -> str:
        return f"{self.process} ({self.how}), back after {self.outage.length_s:.1f} s"


async def two_decode(bench: Bench) -> dict[str, Measured]:
    """Every process, the gateway too, with two decode replicas: whatever dies but the gateway, nobody notices."""
    return {"drill_failed": unnoticed(*await _drill(bench, TWO_DECODE))}


async def one_decode(bench: Bench) -> dict[str, Measured]:
    """The same with one decode replica: its own streams end with one error each, and nothing else goes wrong."""
    return {"drill_single_failed_streams": well_failed(*await _drill(bench, ONE_DECODE))}


def unlike(passes: int) -> dict[str, Any]:
    """Options of a pass over the prompts: no answer finds KV of an earlier one, so that prompts are prefilled, remotely too."""
    return OPTIONS | {"cache_salt": f"pass-{passes}"}


async def _drill(bench: Bench, pools: Sequence[Pool]) -> tuple[Load, list[Kill], dict[str, str]]:
    """Kill every process once a round under load: the load, the kills, and the undisturbed answers by prompt id."""
    prompts = human_eval.load().train[:NUM_PROMPTS]
    kills: list[Kill] = []
    async with running_system(bench.up_arguments, SETTINGS, pools=pools) as system:
        reference = await undisturbed(system, prompts)
        async with background_load(system, prompts, concurrency=CONCURRENCY, options=unlike) as load:
            for how in ROUNDS:
                for name in system.process_names():
                    await calm(system, load)
                    kills.append(await kill(system, name, how))
                    progress(f"{kills[-1].shown()}; {len(load.failed)} of {len(load.results)} requests failed so far")
            await asyncio.sleep(CALM_S)
    return load, kills, reference


async def calm(system: System, load: Load) -> None:
    """Wait until requests are served again, one for each client, and some over the prefill pool.

    Raises SystemUnderTestError where they are not: what nobody uses can be killed unnoticed.
    """
    num_before, num_remote_before = load.num_ok, await num_remote_prefills(system)
    deadline_s = time.monotonic() + BACK_WITHIN_S
    await asyncio.sleep(CALM_S)
    while load.num_ok < num_before + CONCURRENCY or await num_remote_prefills(system) <= num_remote_before:
        if time.monotonic() > deadline_s:
            raise SystemUnderTestError(
                f"within {BACK_WITHIN_S:.0f} s {load.num_ok - num_before} requests were served, "
                f"{await num_remote_prefills(system) - num_remote_before:.0f} over the prefill pool"
            )
        await asyncio.sleep(CALM_S / 8)


async def num_remote_prefills(system: System) -> float:
    """Requests the gateway has sent over the prefill pool since it started."""
    return await system.read_metrics(lambda page: total(page, REMOTE_PREFILLS, path="remote_prefill") or 0.0)


async def undisturbed(system: System, prompts: Sequence[Prompt]) -> dict[str, str]:
    """Every prompt's greedy answer by prompt id."""
    results = await run_batch(system.url, system.model, prompts, concurrency=CONCURRENCY, options=OPTIONS)
    broken = [result for result in results if not result.is_ok]
    if broken:
        raise SystemUnderTestError(f"{len(broken)} requests failed before anything was killed: {broken[0].error}")
    return {result.prompt_id: result.text for result in results}


async def kill(system: System, name: str, how: How) -> Kill:
    """SIGKILL a process and wait until it is back in service; raises SystemUnderTestError where it does not come back."""
    pid = system.process_id(name)
    if pid is None:
        raise SystemUnderTestError(f"{name} is down before it was killed")
    epochs = {engine.id: engine.engine_epoch for engine in (await system.status()).engines}
    killed_at_s = time.monotonic()
    if how == "group" and os.getpgid(pid) == pid:
        os.killpg(pid, signal.SIGKILL)
    else:
        os.kill(pid, signal.SIGKILL)
    dead_at_s = await _until_dead(pid)
    await _until_restarted(system, name, pid)

    def is_back(status: AdminStatus) -> bool:
        return (name != "learner" or status.learner.alive) and all(
            engine.ready and (engine.id != name or engine.engine_epoch != epochs[name]) for engine in status.engines
        )

    await system.until(is_back, f"{name} is back after its SIGKILL", within_s=BACK_WITHIN_S)
    return Kill(name, how, Interval(killed_at_s, time.monotonic()), dead_at_s)


async def _until_dead(pid: int) -> float:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.001)
    return time.monotonic()


async def _until_restarted(system: System, name: str, old_pid: int) -> None:
    deadline_s = time.monotonic() + BACK_WITHIN_S
    while system.process_id(name) in (None, old_pid):
        if time.monotonic() > deadline_s:
            raise SystemUnderTestError(f"{name} was not started again within {BACK_WITHIN_S:.0f} s")
        await asyncio.sleep(0.2)


def unnoticed(load: Load, kills: Sequence[Kill], reference: Mapping[str, str]) -> Measured:
    """Requests that failed or were answered otherwise than undisturbed, those set apart that the gateway's own death broke.

    A killed gateway takes its open connections with it, and none can be made until the next one listens; every other request
    counts, those the next one answers among them.
    """
    cut = _cut(load, kills)
    failed = [result for result in load.failed if result not in cut]
    other = differing(load.results, reference)
    detail = {
        "kills": [kill.shown() for kill in kills],
        "requests": len(load.results),
        "failed": len(failed),
        "reasons": reasons(failed),
        "answered_otherwise": other[:5],
        "cut_by_the_gateways_own_death": len(cut),
    }
    if not load.results:
        return Measured(None, {"reason": "no request was made", **detail})
    return Measured(len(failed) + len(other), detail)


def well_failed(load: Load, kills: Sequence[Kill], reference: Mapping[str, str]) -> Measured:
    """Requests that failed though their engine lived, that failed in a way no client handles, or were answered otherwise.

    What was in flight when the decode engine was killed may end with one error in OpenAI's shape, and so may what was sent until
    it was back. What the gateway's own death broke is set apart; the death of any other process must not be noticed.
    """
    decodes = [kill for kill in kills if kill.process == "decode-0"]
    cut = _cut(load, kills)
    failed = [result for result in load.failed if result not in cut]
    on_it = [result for result in failed if _touches(result, [kill.death for kill in decodes])]
    refused = [result for result in failed if result not in on_it and _touches(result, [kill.outage for kill in decodes])]
    allowed = [result for result in on_it + refused if result.has_one_openai_error]
    wrong = [result for result in failed if result not in allowed]
    other = differing(load.results, reference)
    detail = {
        "kills": [kill.shown() for kill in kills],
        "requests": len(load.results),
        "streams_on_the_killed_engine_that_failed": len(on_it),
        "refused_until_it_was_back": len(refused),
        "cut_by_the_gateways_own_death": len(cut),
        "errors": reasons(allowed),
        "failed_otherwise": len(wrong),
        "reasons": reasons(wrong),
        "answered_otherwise": other[:5],
    }
    if not on_it:
        return Measured(None, {"reason": "no stream ran on the engine when it was killed", **detail})
    return Measured(len(wrong) + len(other), detail)


def _cut(load: Load, kills: Sequence[Kill]) -> list[StreamResult]:
    """Requests that the gateway's own death broke."""
    gateways = [kill for kill in kills if kill.process == "gateway"]
    return [result for result in load.failed if any(_is_cut(result, kill) for kill in gateways)]


def _is_cut(result: StreamResult, kill: Kill) -> bool:
    """Whether a request was open when the gateway died, or found none to answer it."""
    outage = kill.outage
    was_open = _touches(result, [kill.death])
    was_unanswered = result.status is None and outage.start_s <= result.sent_at_s and result.ended_at_s <= outage.end_s
    return was_open or was_unanswered


def _touches(result: StreamResult, stretches: Sequence[Interval]) -> bool:
    return any(result.sent_at_s <= stretch.end_s and result.ended_at_s >= stretch.start_s for stretch in stretches)


def differing(results: Sequence[StreamResult], reference: Mapping[str, str]) -> list[str]:
    """Answers that are whole and other than the reference's: which, how it was routed, and where it begins to differ."""
    others = [result for result in results if result.is_ok and result.text != reference[result.prompt_id]]
    return [_difference(result, reference[result.prompt_id]) for result in others]


def _difference(result: StreamResult, expected: str) -> str:
    place = next(
        (i for i, (a, b) in enumerate(zip(result.text, expected, strict=False)) if a != b), min(len(result.text), len(expected))
    )
    seen, wanted = result.text[place:][:_SHOWN_CHARACTERS], expected[place:][:_SHOWN_CHARACTERS]
    where = f"{result.prompt_id}, {result.kv_path}, request {result.request_id}"
    return f"{where}: {seen!r} instead of {wanted!r} at character {place} of {len(expected)}"
