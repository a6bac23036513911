"""Our engine against stock vLLM, all alone and asked directly, so that only what is left out of the stock one differs.

Two engines of each side, started in the order ours, stock, stock, ours: of equal engines the one started first is some
4 % slower on a small machine, and a single pair would measure that.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtest.bars.load import progress
from loadtest.bars.registry import Bench
from loadtest.closed_loop import run_batch
from loadtest.processes import SystemUnderTestError
from loadtest.sources import human_eval
from loadtest.statistics import PairedRatio, paired_ratio
from loadtest.system import lone_engine, make_draft, served_model
from loadtest.traffic import Prompt

NUM_ROUNDS = 6
CONCURRENCY = 8
NUM_PROMPTS = 16
OPTIONS = {"max_tokens": 96, "temperature": 0.0, "ignore_eos": True}

Prepare = Callable[[str], Awaitable[None]]
"""Takes the URL of an engine of ours."""


@dataclass
class Sides:
    """Tokens per second of each batch; two engines of a side take turns."""

    ours: list[float] = field(default_factory=list)
    stock: list[float] = field(default_factory=list)

    def ratio(self) -> PairedRatio:
        """Ours over stock, by round."""
        return paired_ratio(_sums_of_two(self.ours), _sums_of_two(self.stock))

    def detail(self) -> dict[str, Any]:
        ratio = self.ratio()
        return {
            "cost_pct": round(100 * (1 - ratio.mean), 2),
            "standard_error_pct": round(100 * ratio.standard_error, 2),
            "rounds": ratio.num_pairs,
            "tok_s_ours": [round(value, 1) for value in self.ours],
            "tok_s_stock": [round(value, 1) for value in self.stock],
        }


async def against_stock(
    bench: Bench, *, without: Sequence[str], before: Prepare | None = None, after: Prepare | None = None
) -> Sides:
    """Measure; `without` names the options that the stock engines lack. Nothing is captured, the draft is random."""
    prompts = human_eval.load().train[:NUM_PROMPTS]
    sides = Sides()
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as directory:
        settings = [f"state.dir={directory}", "capture.rate=0.0"]
        make_draft(bench.up_arguments, settings)
        (Path(directory) / "run").mkdir()  # `up` makes it; engines bind their event sockets there
        async with AsyncExitStack() as engines:
            running: list[tuple[str, list[float]]] = []
            for is_ours in (True, False, False, True):
                left_out = () if is_ours else without
                url = await engines.enter_async_context(lone_engine(bench.up_arguments, settings, without=left_out))
                running.append((url, sides.ours if is_ours else sides.stock))
                if is_ours and before is not None:
                    await before(url)
            model = await served_model(running[0][0])
            for url, _ in running:
                await engine_throughput(url, model, prompts)
            for round_number in range(NUM_ROUNDS):
                for url, values in running if round_number % 2 else reversed(running):
                    values.append(await engine_throughput(url, model, prompts))
                progress(f"round {round_number + 1} of {NUM_ROUNDS}: {sides.ours[-2:]} tok/s ours, {sides.stock[-2:]} stock")
            for url, values in running:
                if values is sides.ours and after is not None:
                    await after(url)
    return sides


async def engine_throughput(url: str, model: str, prompts: tuple[Prompt, ...]) -> float:
    """Tokens per second of one batch."""
    started_at_s = time.monotonic()
    results = await run_batch(url, model, prompts, concurrency=CONCURRENCY, options=OPTIONS)
    failed = [result for result in results if not result.is_ok]
    if failed:
        raise SystemUnderTestError(f"{len(failed)} requests failed: {failed[0].error}")
    return sum(result.num_tokens for result in results) / (time.monotonic() - started_at_s)


def _sums_of_two(values: list[float]) -> list[float]:
    """What the two engines of one side did in each round."""
    return [first + second for first, second in zip(values[::2], values[1::2], strict=True)]
