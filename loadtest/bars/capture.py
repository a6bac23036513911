"""What capture costs: the same batch of requests with it and without it, alternating in one run."""

from __future__ import annotations

import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

from loadtest.bars.load import progress
from loadtest.bars.registry import Bench, Measured
from loadtest.closed_loop import run_batch
from loadtest.processes import SystemUnderTestError
from loadtest.sources import human_eval
from loadtest.statistics import paired_ratio
from loadtest.system import OUR_PARTS, System, lone_engine, make_draft, running_system, served_model
from loadtest.traffic import Prompt

NUM_PAIRS = 8
NUM_ROUNDS = 6
CONCURRENCY = 8
NUM_PROMPTS = 16
OPTIONS = {"max_tokens": 96, "temperature": 0.0, "ignore_eos": True}


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
    """Our engine at rate 0 against stock vLLM with the same draft; all alone and asked directly, so only our parts differ.

    Two engines of each side, started in the order ours, stock, stock, ours: of equal engines the one started first is some
    4 % slower on a small machine, and a single pair would measure that.
    """
    prompts = human_eval.load().train[:NUM_PROMPTS]
    ours: list[float] = []
    stock: list[float] = []
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as directory:
        settings = [f"state.dir={directory}", "capture.rate=0.0"]
        make_draft(bench.up_arguments, settings)
        (Path(directory) / "run").mkdir()  # `up` makes it; engines bind their event sockets there
        async with AsyncExitStack() as engines:
            sides: list[tuple[str, list[float]]] = []
            for without, values in (((), ours), (OUR_PARTS, stock), (OUR_PARTS, stock), ((), ours)):
                url = await engines.enter_async_context(lone_engine(bench.up_arguments, settings, without=without))
                sides.append((url, values))
            model = await served_model(sides[0][0])
            for url, _ in sides:
                await engine_throughput(url, model, prompts)
            for round_number in range(NUM_ROUNDS):
                for url, values in sides if round_number % 2 else reversed(sides):
                    values.append(await engine_throughput(url, model, prompts))
                progress(f"round {round_number + 1} of {NUM_ROUNDS}: {ours[-2:]} tok/s with our parts, {stock[-2:]} without")
    ratio = paired_ratio(_sums_of_two(ours), _sums_of_two(stock))
    detail = {
        "cost_pct": round(100 * (1 - ratio.mean), 2),
        "standard_error_pct": round(100 * ratio.standard_error, 2),
        "rounds": ratio.num_pairs,
        "tok_s_ours": [round(value, 1) for value in ours],
        "tok_s_stock": [round(value, 1) for value in stock],
    }
    return {"capture_off_pct": Measured(100 * (1 - ratio.mean - 2 * ratio.standard_error), detail)}


def _sums_of_two(values: list[float]) -> list[float]:
    """What the two engines of one side did in each round."""
    return [first + second for first, second in zip(values[::2], values[1::2], strict=True)]


async def throughput(system: System, prompts: tuple[Prompt, ...], *, rate: float) -> float:
    """Tokens per second through the gateway with this share of requests captured."""
    await system.must("POST", "/admin/capture", {"rate": rate})
    return await engine_throughput(system.url, system.model, prompts)


async def engine_throughput(url: str, model: str, prompts: tuple[Prompt, ...]) -> float:
    """Tokens per second of one batch."""
    started_at_s = time.monotonic()
    results = await run_batch(url, model, prompts, concurrency=CONCURRENCY, options=OPTIONS)
    failed = [result for result in results if not result.is_ok]
    if failed:
        raise SystemUnderTestError(f"{len(failed)} requests failed: {failed[0].error}")
    return sum(result.num_tokens for result in results) / (time.monotonic() - started_at_s)
