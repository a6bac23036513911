"""Our load tester beside others in front of a real system: they must read the same numbers."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from loadtest.bars.load import progress
from loadtest.bars.registry import Bench, Measured
from loadtest.crosscheck.numbers import Numbers
from loadtest.crosscheck.turns import TOOLS, Turns, in_turn
from loadtest.crosscheck.workload import Workload, questions
from loadtest.processes import one_core_left_free
from loadtest.system import planned, running_system

BLOCK_S = 180.0
CONCURRENCY = 4
MAX_TOKENS = 48
SETTINGS = (
    "learner.enabled=false",
    "capture.rate=0.0",
    "engine.enforce_eager=true",
    # A prompt's second time must take as long as its first, or the side that begins would wait longer.
    "engine.enable_prefix_caching=false",
)


async def vllm_bench(bench: Bench) -> dict[str, Measured]:
    """Against `vllm bench serve`."""
    return {"crosscheck_vllm_pct": measured(await _compare("vllm", bench))}


async def aiperf(bench: Bench) -> dict[str, Measured]:
    """Against aiperf."""
    return {"crosscheck_aiperf_pct": measured(await _compare("aiperf", bench))}


async def _compare(tool: str, bench: Bench) -> Turns:
    """The load testers have a core of their own, or what is compared is how much of the server's they take."""
    TOOLS[tool].prepare()
    with one_core_left_free() as cores:
        async with running_system(bench.up_arguments, SETTINGS) as system:
            workload = Workload(
                url=system.url,
                model=system.model,
                tokenizer_dir=Path(planned(bench.up_arguments)["target_dir"]),
                prompts=questions(),
                concurrency=CONCURRENCY,
                max_tokens=MAX_TOKENS,
                cores=cores,
            )
            return await in_turn(TOOLS[tool], workload, BLOCK_S, progress)


def measured(turns: Turns) -> Measured:
    """The worst difference, with every run of both sides."""
    detail = {
        "difference_pct": {name: round(value, 2) for name, value in turns.differences_pct.items()},
        "ours": [_rounded(run) for run in turns.ours],
        turns.name: [_rounded(run) for run in turns.theirs],
    }
    return Measured(turns.worst_pct, detail)


def _rounded(run: Numbers) -> dict[str, float]:
    return {name: round(value, 3) for name, value in asdict(run).items()}
