"""The bars of `paceline bench learning`: that benchmark's arms that are not done yet are run, then all are judged."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from loadtest.bars.load import progress
from loadtest.bars.registry import Bench, Measured
from loadtest.learning.arms import start_with
from loadtest.learning.benchmark import Benchmark, locate
from loadtest.learning.command import run_and_report
from loadtest.learning.verdicts import measured as judged

BENCHMARK = "learning"
DIRECTORY = Path("runs") / BENCHMARK
"""Where `paceline bench learning` writes as well."""


async def measured(bench: Bench) -> Mapping[str, Measured]:
    """Raises PacelineError where it cannot begin. An arm that fails, or that other code measured, leaves its bars unmeasured."""
    benchmark = Benchmark.read(locate(Path(BENCHMARK)), [])
    results, _ = await run_and_report(
        benchmark, (), DIRECTORY, start_with(bench.up_arguments), bench.up_arguments, bench.provenance, progress
    )
    return judged(results)
