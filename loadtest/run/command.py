"""`paceline bench run`: read the scenario, find the target, run, and say what came out."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import aiohttp
import uvloop

from loadtest.client import new_session
from loadtest.records import RunRecord
from loadtest.run import actions
from loadtest.run.conduct import Provenance, conduct
from loadtest.run.lanes import Prompts
from loadtest.run.output import Output
from loadtest.run.target import Target, find
from loadtest.scenario import Scenario, locate
from loadtest.schedule import LanePlan, label, plan, sources
from loadtest.sources import load, open_part

MAX_USUAL_SHARE = 0.001
"""Of a large corpus, records that hold no prompt: ShareGPT has one in 9,000."""


def run(
    path: Path,
    overrides: Sequence[str],
    *,
    url: str | None,
    admin_url: str | None,
    model: str | None,
    state_dir: Path,
    out_dir: Path | None,
    commit: str | None,
    versions: Mapping[str, str],
) -> int:
    """`path` may be a shipped scenario's name.

    Returns 0 for a valid run, 1 for one that must not be believed; raises PacelineError where it cannot begin.
    """
    scenario = Scenario.read(locate(path), list(overrides))
    loaded = {name: load(name) for name, _ in sources(scenario)}
    prompts = {(name, split): open_part(name, loaded[name], split) for name, split in sources(scenario)}
    plans = plan(scenario, lambda name, split: len(prompts[name, split]))
    broken = {name: source.num_broken for name, source in loaded.items()}
    broken |= {f"traces of {lane_plan.lane.name}": lane_plan.num_broken_rows for lane_plan in plans}
    provenance = Provenance(commit, versions, {name: number for name, number in broken.items() if number})
    num_records = {name: source.num_records for name, source in loaded.items()}
    for name, number in provenance.num_broken.items():
        print(left_out(name, number, num_records.get(name)))
    directory = out_dir or Path("runs") / f"{label(scenario.name)}-{time.strftime('%Y%m%d-%H%M%S')}"
    find_target = partial(find, url=url, admin_url=admin_url, model=model, state_dir=state_dir)
    record = uvloop.run(_run(scenario, plans, prompts, find_target, directory, provenance))
    print(summary(record, scenario, directory))
    return 0 if record.is_valid else 1


def left_out(name: str, num_broken: int, num_records: int | None) -> str:
    """A line on what could not be read of a source, or of a lane's traces, whose size nobody counted."""
    if num_records is not None and num_broken <= MAX_USUAL_SHARE * num_records:
        return f"note: of {num_records} records of {name}, {num_broken} left out that hold no prompt or cannot be read"
    of_all = "" if num_records is None else f" of {num_records}"
    return f"{name}: broken and passed over: {num_broken}{of_all} (a stretch that cannot be read counts once, however long)"


async def _run(
    scenario: Scenario,
    plans: Sequence[LanePlan],
    prompts: Prompts,
    find_target: Callable[[aiohttp.ClientSession], Awaitable[Target]],
    directory: Path,
    provenance: Provenance,
) -> RunRecord:
    async with new_session(1) as session:
        target = await find_target(session)
        actions.check(scenario, target)
        output = Output(directory, scenario)
        try:
            return await conduct(scenario, plans, prompts, target, output, provenance)
        finally:
            output.close()


def summary(record: RunRecord, scenario: Scenario, directory: Path) -> str:
    """What came out, in a few lines."""
    counts = ", ".join(
        f"{count} {outcome}" for outcome, count in sorted(record.num_requests.items(), key=lambda item: -item[1])
    )
    lines = [
        f"{record.name}: {sum(record.num_requests.values())} requests in {record.duration_s or 0:.1f} s: {counts or 'none'}"
    ]
    if record.dispatch_lag_ms.get("p99") is not None:
        lag = ", ".join(f"{name} {value:.2f} ms" for name, value in record.dispatch_lag_ms.items() if value is not None)
        lines.append(f"dispatch lag: {lag} (bound on p99: {scenario.max_dispatch_lag_p99_ms:g} ms)")
    if record.busy_share is not None:
        lines.append(f"the load tester itself used {record.busy_share:.0%} of a core")
    failed = [action for action in record.actions if action.problem]
    lines += [f"{f'{action.do} {action.process}'.strip()} at {action.at_s:.1f} s failed: {action.problem}" for action in failed]
    lines += [f"INVALID: {reason}" for reason in record.invalid_reasons]
    lines.append(f"written to {directory}; see it: paceline bench report {directory}")
    return "\n".join(lines)
