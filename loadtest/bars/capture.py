"""What capture costs: the same batch of requests with it and without it, alternating in one run."""

from __future__ import annotations

from loadtest.bars.load import progress
from loadtest.bars.lone_engines import NUM_PROMPTS, against_stock, engine_throughput
from loadtest.bars.registry import Bench, Measured
from loadtest.sources import human_eval
from loadtest.statistics import paired_ratio
from loadtest.system import OUR_PARTS, System, running_system
from loadtest.traffic import Prompt

NUM_PAIRS = 8


async def capture_cost(bench: Bench) -> dict[str, Measured]:
    """The order within pairs alternates, so that drift cancels. The learner receives but does not train."""
    prompts = human_eval.load().train[:NUM_PROMPTS]
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


async def capture_off(bench: Bench) -> dict[str, Measured]:
    """Our engine at rate 0 against stock vLLM with the same draft."""
    sides = await against_stock(bench, without=OUR_PARTS)
    ratio = sides.ratio()
    return {"capture_off_pct": Measured(100 * (1 - ratio.mean - 2 * ratio.standard_error), sides.detail())}


async def throughput(system: System, prompts: tuple[Prompt, ...], *, rate: float) -> float:
    """Tokens per second through the gateway with this share of requests captured."""
    await system.must("POST", "/admin/capture", {"rate": rate})
    return await engine_throughput(system.url, system.model, prompts)
