"""What capture costs: the same batch of requests with a rate of 1 and of 0, alternating in one run."""

from __future__ import annotations

import time

from loadtest.bars.load import progress
from loadtest.bars.registry import Bench, Measured
from loadtest.closed_loop import run_batch
from loadtest.statistics import paired_ratio
from loadtest.system import System, SystemUnderTestError, running_system
from loadtest.traffic import Prompt, human_eval

NUM_PAIRS = 8
CONCURRENCY = 8
NUM_PROMPTS = 16
OPTIONS = {"max_tokens": 96, "temperature": 0.0, "ignore_eos": True}


async def capture_cost(bench: Bench) -> dict[str, Measured]:
    """The order within pairs alternates, so that drift cancels. The learner receives but does not train."""
    prompts = human_eval().train[:NUM_PROMPTS]
    full: list[float] = []
    none: list[float] = []
    async with running_system(bench.up_arguments) as system:
        # Without a receiver rows are dropped before they cost anything.
        await system.learner_report()
        await system.must("POST", "/admin/learner/pause")
        await throughput(system, prompts, rate=1.0)
        for pair in range(NUM_PAIRS):
            for rate in (1.0, 0.0) if pair % 2 else (0.0, 1.0):
                (full if rate else none).append(await throughput(system, prompts, rate=rate))
            progress(f"pair {pair + 1} of {NUM_PAIRS}: {full[-1]:.1f} tok/s with capture, {none[-1]:.1f} without")
        capture = (await system.status()).capture
    ratio = paired_ratio(full, none)
    detail = {
        "standard_error_pct": round(100 * ratio.standard_error, 2),
        "pairs": ratio.num_pairs,
        "tok_s_with": [round(value, 1) for value in full],
        "tok_s_without": [round(value, 1) for value in none],
        "captured_rows": capture.num_captured_rows,
        "dropped_rows": capture.num_dropped_rows,
    }
    if not capture.num_captured_rows:
        return {"capture_cost_pct": Measured(None, {"reason": "nothing was captured", **detail})}
    return {"capture_cost_pct": Measured(100 * (1 - ratio.mean), detail)}


async def throughput(system: System, prompts: tuple[Prompt, ...], *, rate: float) -> float:
    """Tokens per second of one batch with this share of requests captured."""
    await system.must("POST", "/admin/capture", {"rate": rate})
    started_at_s = time.monotonic()
    results = await run_batch(system.url, system.model, prompts, concurrency=CONCURRENCY, options=OPTIONS)
    failed = [result for result in results if not result.is_ok]
    if failed:
        raise SystemUnderTestError(f"{len(failed)} requests failed: {failed[0].error}")
    return sum(result.num_tokens for result in results) / (time.monotonic() - started_at_s)
