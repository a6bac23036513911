"""`paceline bench run`, as its users start it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from loadtest.crosscheck.child import run_to_end
from loadtest.crosscheck.numbers import Numbers, of_vllm_keys
from loadtest.crosscheck.workload import OPTIONS, TEMPERATURE, Workload
from loadtest.processes import SystemUnderTestError
from loadtest.report.analysis import analyse
from loadtest.report.result import result
from loadtest.run.output import as_toml
from loadtest.scenario import Scenario


async def measure(workload: Workload, duration_s: float, directory: Path) -> Numbers:
    """A closed loop for so long, nothing cut; raises SystemUnderTestError where requests fail."""
    (directory / "prompts.jsonl").write_text(
        "".join(json.dumps({"messages": [{"role": "user", "content": text}]}) + "\n" for text in workload.prompts)
    )
    (directory / "closed.toml").write_text(as_toml(scenario(workload, duration_s, directory / "prompts.jsonl")))
    words = ["bench", "run", str(directory / "closed.toml"), "--url", workload.url, "--model", workload.model]
    argv = [sys.executable, "-m", "launch.cli", *words, "--out", str(directory / "run")]
    await run_to_end(argv, directory, cores=workload.cores)
    return read(directory / "run")


def scenario(workload: Workload, duration_s: float, prompts: Path) -> Scenario:
    """The closed loop as a scenario."""
    phase = {
        "name": "all",
        "duration_s": duration_s,
        "arrivals": {"kind": "closed", "concurrency": workload.concurrency},
        "traffic": {str(prompts): 1},
    }
    lane = {"name": "all", "phase": [phase], "max_tokens": workload.max_tokens, "temperature": TEMPERATURE, "options": OPTIONS}
    named = {"name": "crosscheck", "what": "A closed loop beside another load tester's.", "lane": [lane]}
    return Scenario.build(named, source="the cross-check")


def read(run: Path) -> Numbers:
    """From the directory of a run."""
    analysis = analyse(run)
    if analysis.why_invalid:
        raise SystemUnderTestError(f"our run is invalid: {'; '.join(analysis.why_invalid)}")
    return of_vllm_keys(result(analysis))
