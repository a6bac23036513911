"""Does the draft learn from traffic: AL on held-out problems in the running engine, from a random draft."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from loadtest.bars.load import background_load, progress
from loadtest.bars.registry import Bench, Measured
from loadtest.closed_loop import run_batch
from loadtest.exposition import acceptance
from loadtest.sources import human_eval
from loadtest.system import System, running_system
from loadtest.traffic import Prompt

DEPTH = 3
DEADLINE_S = 15 * 60.0
EVERY_S = 60.0
FINAL_S = 150.0
"""Kept free before the deadline for one pass over all held-out problems."""
GOAL = 1.8
GLANCE_PROMPTS = 4
MAX_TOKENS = 128
CONCURRENCY = 4
HELDOUT_HEADERS = {"X-Paceline-Domain": "heldout", "X-Paceline-Capture": "off"}

_SETTLE_S = 2.5
"""Engines report their counters once a second."""


async def al_heldout(bench: Bench) -> dict[str, Measured]:
    """Train-split traffic for up to 15 minutes; a glance at some held-out problems every minute, a full pass at the end.

    The value is that of the full pass. It is made early where two glances in a row are above the bar.
    """
    source = human_eval.load()
    async with running_system(bench.up_arguments, [f"draft.num_speculative_tokens={DEPTH}"]) as system:
        started_at_s = time.monotonic()
        curve: list[tuple[float, float | None]] = []
        first = await heldout_al(system, source.heldout[:GLANCE_PROMPTS])
        curve.append((0.0, first))
        async with background_load(system, source.train, concurrency=CONCURRENCY) as load:
            final = None
            while final is None:
                await asyncio.sleep(max(EVERY_S - (time.monotonic() - started_at_s) % EVERY_S, 1.0))
                elapsed_s = time.monotonic() - started_at_s
                is_last = elapsed_s >= DEADLINE_S - FINAL_S
                if is_last or is_worth_a_full_pass([value for _, value in curve]):
                    value = await heldout_al(system, source.heldout)
                    if is_last or (value is not None and value >= GOAL):
                        final = value
                        break
                else:
                    value = await heldout_al(system, glance(source.heldout, len(curve)))
                curve.append((elapsed_s, value))
                progress(
                    f"{elapsed_s / 60:.0f} min: AL on held-out problems {_shown(value)}, {len(load.results)} requests served"
                )
        elapsed_s = time.monotonic() - started_at_s
        status = await system.status()
    detail = {
        "curve_min_al": [(round(at_s / 60, 1), None if value is None else round(value, 3)) for at_s, value in curve],
        "minutes": round(elapsed_s / 60, 1),
        "active_version": status.active_version,
        "swaps": sum(swap.outcome == "committed" for swap in status.swaps),
        "requests": len(load.results),
        "failed_requests": len(load.failed),
        "heldout_problems": len(source.heldout),
    }
    return {"al_heldout": Measured(final, detail)}


def is_worth_a_full_pass(glances: Sequence[float | None]) -> bool:
    """Two glances in a row above the goal."""
    return len(glances) >= 2 and all(value is not None and value >= GOAL for value in glances[-2:])


def glance(prompts: Sequence[Prompt], number: int) -> list[Prompt]:
    """Another few problems each time, round and round."""
    start = number * GLANCE_PROMPTS
    return [prompts[(start + offset) % len(prompts)] for offset in range(min(GLANCE_PROMPTS, len(prompts)))]


async def heldout_al(system: System, prompts: Sequence[Prompt]) -> float | None:
    """AL over exactly these requests, from the engines' own counters by domain."""
    before = acceptance(await system.metrics(), domain="heldout")
    await run_batch(
        system.url,
        system.model,
        prompts,
        concurrency=CONCURRENCY,
        options={"max_tokens": MAX_TOKENS, "temperature": 0.0},
        headers=HELDOUT_HEADERS,
    )
    await asyncio.sleep(_SETTLE_S)
    return (acceptance(await system.metrics(), domain="heldout") - before).acceptance_length


def _shown(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2f}"
