"""Every shipped scenario runs: its small variant, as a person starts it, against mock engines behind the real gateway."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kept_system import kept_system
from samples import fill

from loadtest.mock_engine import SPEC, Pace
from loadtest.records import RequestRecord, RunRecord
from loadtest.report.analysis import analyse
from loadtest.report.command import report
from loadtest.rig import OPERATOR_TOKEN, gateway_config, mock_addresses, running_gateway, running_mocks
from loadtest.scenario import SHIPPED
from loadtest.statistics import Interval
from wire.ports import free_ports
from wire.store import DraftStore

SIDE_BY_SIDE = sorted(path.stem for path in SHIPPED.glob("*.small.toml") if not path.stem.startswith("faults"))

pytestmark = pytest.mark.rig


@asynccontextmanager
async def local_system(state_dir: Path) -> AsyncIterator[None]:
    """Two engines and two drafts to swap, as `bench run --state` finds them."""
    store = DraftStore(state_dir)
    for _ in range(2):
        store.publish(partial(fill, spec=SPEC))
    addresses = mock_addresses(2, Pace(first_token_s=0.02, between_tokens_s=0.01))
    (admin_port,) = free_ports(1)
    config = {**gateway_config(addresses), "state_dir": str(state_dir)}
    async with running_mocks(addresses) as pids, running_gateway(config, admin_port=admin_port) as url:
        (state_dir / "run").mkdir(exist_ok=True)
        (state_dir / "run" / "operator.token").write_text(OPERATOR_TOKEN)
        processes = {f"engine-{index}": {"pid": pid} for index, pid in enumerate(pids)}
        system = {"gateway_url": url, "admin_url": f"http://127.0.0.1:{admin_port}", "processes": processes}
        (state_dir / "run" / "system.json").write_text(json.dumps(system))
        yield


async def bench_run(name: str, state_dir: Path, out_dir: Path) -> tuple[RunRecord, list[RequestRecord]]:
    """By its name. A busy machine does not fail it."""
    words = [name, "--state", str(state_dir), "--out", str(out_dir), "--set", "max_dispatch_lag_p99_ms=10000"]
    argv = [sys.executable, "-m", "launch.cli", "bench", "run", *words]
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT)
    output, _ = await process.communicate()
    assert process.returncode == 0, f"{name}: {output.decode()}"
    run = msgspec.json.decode((out_dir / "run.json").read_bytes(), type=RunRecord)
    return run, [
        msgspec.json.decode(line, type=RequestRecord) for line in (out_dir / "requests.jsonl").read_bytes().splitlines()
    ]


def whole(run: RunRecord, requests: list[RequestRecord]) -> dict[str, Any]:
    """What is wrong with a run: nothing, if all is well."""
    outcomes = {one.outcome: one.error for one in requests if one.outcome not in ("ok", "cancelled")}
    problems = {action.do: action.problem for action in run.actions if action.problem}
    return {**outcomes, **problems, **({} if run.is_valid else {"invalid": run.invalid_reasons})}


def test_the_small_variants_run_and_label_every_request_with_its_domain(tmp_path: Path) -> None:
    async def run() -> list[tuple[RunRecord, list[RequestRecord]]]:
        async with local_system(tmp_path / "state"):
            return await asyncio.gather(*(bench_run(name, tmp_path / "state", tmp_path / name) for name in SIDE_BY_SIDE))

    found = dict(zip(SIDE_BY_SIDE, asyncio.run(run()), strict=True))
    assert {name: wrong for name, one in found.items() if (wrong := whole(*one))} == {}
    domains = {name: {one.domain for one in requests} for name, (_, requests) in found.items()}
    assert domains["domain_shift.small"] == {"human_eval", "sharegpt", "reasoning_gym"}
    assert domains["long_prompts.small"] == {"sharegpt"}
    swaps, requests = found["swap_storm.small"]
    assert 2 <= len(swaps.actions) <= 6
    assert {one.draft_version for one in requests} >= {"0", "1"}
    assert max(one.turn for one in found["multi_turn.small"][1]) == 2
    read_back_by_their_reports({name: tmp_path / name for name in SIDE_BY_SIDE})
    rollouts = {one.lane: one.is_open_loop for one in found["rl_and_users.small"][1]}
    assert rollouts == {"users": True, "rollouts": False}


def read_back_by_their_reports(runs: Mapping[str, Path]) -> None:
    """Shifts, swaps and domains of the runs are in what is told of them."""
    told = {name: analyse(path) for name, path in runs.items()}
    assert {name: analysis.why_invalid for name, analysis in told.items() if analysis.why_invalid} == {}
    shift = told["domain_shift.small"]
    changes = [(recovery.shift.before, recovery.shift.after) for recovery in shift.recoveries]
    assert changes == [("human_eval", "sharegpt"), ("sharegpt", "reasoning_gym"), ("reasoning_gym", "human_eval")]
    assert set(shift.series.acceptance_length_by_domain) == {"human_eval", "sharegpt", "reasoning_gym"}
    assert shift.acceptance.acceptance_length.value == pytest.approx(2.0)
    storm = told["swap_storm.small"]
    assert storm.blip is not None
    assert len(storm.blip.swaps) >= 2
    lines: list[str] = []
    assert report(runs["domain_shift.small"], None, lines.append) == 0
    page = (runs["domain_shift.small"] / "report.html").read_text()
    assert all(domain in page for domain in ("human_eval", "sharegpt", "reasoning_gym"))
    assert sum(line.startswith("Shift at") for line in lines) == 3


def test_clients_notice_of_the_small_variant_of_faults_the_death_of_the_gateway_alone(tmp_path: Path) -> None:
    async def run() -> tuple[RunRecord, list[RequestRecord], Interval]:
        async with kept_system(tmp_path / "state") as keeper:
            record, requests = await bench_run("faults.small", tmp_path / "state", tmp_path / "out")
            await keeper.until_up("learner", "engine-0", "gateway")
            assert {name: len(outages) for name, outages in keeper.outages.items()} == {
                "learner": 1,
                "engine-0": 1,
                "gateway": 1,
            }
            return record, requests, keeper.outages["gateway"][0]

    record, requests, outage = asyncio.run(run())
    assert [(action.do, action.process, action.problem) for action in record.actions] == [
        ("kill", "learner", None),
        ("kill", "engine-0", None),
        ("kill", "gateway", None),
    ]
    assert record.is_valid, record.invalid_reasons
    killed_at_s, back_at_s = record.actions[-1].at_s, outage.end_s - record.started_at_s
    noticed = [one for one in requests if one.outcome != "ok"]
    assert noticed, "a gateway that dies takes its answers with it"
    assert [one.error for one in noticed if one.ended_at_s < killed_at_s or one.sent_at_s > back_at_s] == []
    assert {one.domain for one in requests if one.outcome == "ok"} == {"human_eval", "sharegpt"}
