"""Our load tester and another one in turn on one server."""

from __future__ import annotations

import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from loadtest.closed_loop import run_batch
from loadtest.crosscheck import aiperf, ours, vllm_bench
from loadtest.crosscheck.numbers import COMPARED, Numbers, differences_pct, mean, worst_pct
from loadtest.crosscheck.workload import Workload
from loadtest.processes import SystemUnderTestError
from loadtest.traffic import Prompt

ORDER = ("ours", "theirs", "theirs", "ours")
"""So that a server that slowly becomes faster or slower does so for both."""


@dataclass(frozen=True)
class Tool:
    """Another load tester."""

    name: str
    prepare: Callable[[], None]
    """Raises SystemUnderTestError where it is not there."""
    measure: Callable[[Workload, int, Path], Awaitable[Numbers]]
    """So many requests, with files in that directory."""


TOOLS = {
    "vllm": Tool(vllm_bench.NAME, vllm_bench.prepare, vllm_bench.measure),
    "aiperf": Tool(aiperf.NAME, aiperf.prepare, aiperf.measure),
}


@dataclass
class Turns:
    """What both sides reported, run by run."""

    name: str
    """Of the other load tester."""
    ours: list[Numbers] = field(default_factory=list)
    theirs: list[Numbers] = field(default_factory=list)

    @property
    def differences_pct(self) -> dict[str, float]:
        return differences_pct(self.ours, self.theirs)

    @property
    def worst_pct(self) -> float:
        return worst_pct(self.differences_pct)

    def table(self) -> list[str]:
        """Both sides as lines of text, every run and their difference."""
        lines = [f"{'':<16}{'ours':>22}{self.name:>22}{'difference':>12}"]
        for name in (*COMPARED, "prompt_tokens", "output_tokens", "num_requests"):
            difference = f"{100 * (mean(self.ours, name) / mean(self.theirs, name) - 1):+.2f} %"
            lines.append(f"{name:<16}{_shown(self.ours, name):>22}{_shown(self.theirs, name):>22}{difference:>12}")
        return lines


async def in_turn(tool: Tool, workload: Workload, duration_s: float, say: Callable[[str], None]) -> Turns:
    """Two runs of each side. Ours last `duration_s`, theirs have as many requests as our first.

    Raises SystemUnderTestError where the other load tester is not there, or a request fails.
    """
    tool.prepare()
    await _warm_up(workload)
    turns = Turns(tool.name)
    for number, side in enumerate(ORDER):
        with tempfile.TemporaryDirectory(prefix="paceline-crosscheck-") as directory:
            if side == "ours":
                run = await ours.measure(workload, duration_s, Path(directory))
                turns.ours.append(run)
            else:
                run = await tool.measure(workload, turns.ours[0].num_requests, Path(directory))
                turns.theirs.append(run)
        name = "ours" if side == "ours" else tool.name
        say(f"{number + 1} of {len(ORDER)}, {name}: {run.num_requests} requests, {run.tokens_per_s:.1f} tokens/s")
    return turns


async def _warm_up(workload: Workload) -> None:
    prompts = [
        Prompt(str(index), ({"role": "user", "content": text},))
        for index, text in enumerate(workload.texts(2 * workload.concurrency))
    ]
    results = await run_batch(workload.url, workload.model, prompts, concurrency=workload.concurrency, options=workload.body)
    failed = [result for result in results if not result.is_ok]
    if failed:
        raise SystemUnderTestError(f"{len(failed)} of {len(results)} requests failed: {failed[0].error}")


def _shown(runs: Sequence[Numbers], name: str) -> str:
    return "  ".join(f"{getattr(run, name):.5g}" for run in runs)
