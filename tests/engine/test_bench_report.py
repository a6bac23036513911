"""A load test of a real engine behind the real gateway: what vLLM tells of each request and what is counted agree, and vLLM's
own tools read the report.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from live_engine import TOKEN, LiveEngine
from vllm.benchmarks.sweep import plot, plot_pareto
from vllm.benchmarks.sweep.plot import SweepPlotArgs
from vllm.benchmarks.sweep.plot_pareto import SweepPlotParetoArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from launch.cli import main
from loadtest.measures.run_directory import RunDirectory
from loadtest.report.analysis import Analysis, analyse
from loadtest.report.result import SUMMARY_FILE
from loadtest.rig import running_gateway

NUM_POSITIONS = 3
MAX_TOKENS = 48
SCENARIO = f"""
name = "detailed"
what = "Two users beside each other, answer after answer."
seed = 3
slo = {{ttft_ms = 60000}}
max_dispatch_lag_p99_ms = 60000
[[lane]]
name = "users"
max_tokens = {MAX_TOKENS}
temperature = 1.0
options = {{ignore_eos = true}}
[[lane.phase]]
name = "only"
duration_s = 12
arrivals = {{kind = "closed", concurrency = 2}}
traffic = {{"questions.jsonl" = 1}}
"""


@pytest.fixture(scope="module")
def reported(tiny_engine: LiveEngine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of `bench run` through a gateway, and of its `bench report`."""
    directory = tmp_path_factory.mktemp("bench")
    questions = [{"messages": [{"role": "user", "content": f"What is {number} and {number}?"}]} for number in range(40)]
    (directory / "questions.jsonl").write_text("".join(json.dumps(each) + "\n" for each in questions))
    (directory / "detailed.toml").write_text(SCENARIO)

    async def run() -> int:
        endpoint = {"id": "engine-under-test", "url": tiny_engine.url, "events_endpoint": tiny_engine.listener.events_endpoint}
        config = {
            **{"gateway": {}, "admission": {}, "canary": {}, "routing": {}, "engines": [endpoint]},
            **{"target_dir": str(tiny_engine.target_dir), "state_dir": str(tiny_engine.state_dir)},
        }
        async with running_gateway(config, engine_token=TOKEN) as url:
            argv = ["bench", "run", str(directory / "detailed.toml"), "--url", url, "--out", str(directory / "run")]
            process = await asyncio.create_subprocess_exec(sys.executable, "-m", "launch.cli", *argv)
            return await process.wait()

    assert asyncio.run(run()) == 0
    assert main(["bench", "report", str(directory / "run")]) == 0
    return directory / "run"


@pytest.fixture(scope="module")
def found(reported: Path) -> Analysis:
    return analyse(reported)


def test_every_answer_tells_its_verify_steps(reported: Path) -> None:
    records = [record for record in RunDirectory(reported).requests() if record.outcome == "ok"]
    assert len(records) > 5
    for record in records:
        assert record.num_spec_tokens == NUM_POSITIONS
        accepted, drafted = record.accepted_per_step or [], record.drafted_per_step or []
        assert len(accepted) == len(drafted) > 0
        assert all(0 <= few <= many <= NUM_POSITIONS for few, many in zip(accepted, drafted, strict=True))
        # The prefill brings the first token, the last step may emit more than was asked for.
        assert MAX_TOKENS - 1 <= sum(accepted) + len(accepted) < MAX_TOKENS + NUM_POSITIONS


def test_requests_and_counters_tell_the_same_acceptance(found: Analysis) -> None:
    """But for the last second, whose counters come too late, and for steps that emitted more than was asked for."""
    assert found.acceptance_source == "counters"
    requests, counters = found.acceptance_by_source["requests"], found.acceptance_by_source["counters"]
    assert (len(requests.by_position), len(counters.by_position)) == (NUM_POSITIONS, NUM_POSITIONS)
    assert requests.num_steps == pytest.approx(counters.num_steps, rel=0.2)
    assert requests.num_proposed / requests.num_steps == pytest.approx(counters.num_proposed / counters.num_steps, rel=0.05)
    assert requests.by_position == pytest.approx(counters.by_position, abs=0.05)
    assert requests.acceptance_length.value > 1.05
    assert abs(found.acceptance_length_difference or 0.0) < 0.05


def test_acceptance_of_each_position_is_told_over_time(found: Analysis) -> None:
    lines = found.series.acceptance_by_position
    assert list(lines) == ["1", "2", "3"]
    windows = [shares for shares in zip(*lines.values(), strict=True) if None not in shares]
    assert len(windows) > 5
    assert all(1.0 >= first >= second >= third for first, second, third in windows)


def drawn(module: ModuleType, arguments: Any, *words: str) -> None:
    """As `vllm bench sweep plot` and `plot_pareto` do it."""
    parser = FlexibleArgumentParser()
    arguments.add_cli_args(parser)
    module.main(parser.parse_args([*words]))


def test_vllms_sweep_plot_finds_the_report_and_what_it_groups_by(reported: Path) -> None:
    keys = "label,model_id,backend,endpoint_type,max_concurrency,request_rate,spec_decode_draft_tokens,rtfx"
    drawn(plot, SweepPlotArgs, str(reported), "--fig-by", keys, "--dry-run")
    with pytest.raises(ValueError, match="Cannot find metric 'absent'"):
        drawn(plot, SweepPlotArgs, str(reported), "--fig-by", "absent", "--dry-run")


def test_vllms_pareto_plot_reads_users_and_throughput(reported: Path, found: Analysis) -> None:
    drawn(plot_pareto, SweepPlotParetoArgs, str(reported), "--dry-run")
    rows = json.loads((reported / SUMMARY_FILE).read_text())
    (prepared,), num_skipped = plot_pareto._prepare_records(rows, user_count_var="max_concurrency", gpu_count_var=None)
    assert num_skipped == 0
    assert prepared["tokens_per_user"] == pytest.approx(found.throughput.tokens_per_s.value / 2)


def test_vllms_plots_draw_the_report(reported: Path) -> None:
    for package in ("pandas", "seaborn"):
        pytest.importorskip(package, reason=f"vLLM's plots need {package}")
    for measure in ("median_ttft_ms", "p99_tpot_ms", "request_goodput", "spec_decode_acceptance_rate"):
        drawn(plot, SweepPlotArgs, str(reported), "--var-y", measure, "--fig-name", measure, "--curve-by", "label")
        assert list(reported.glob(f"{measure}*.png"))
    drawn(plot_pareto, SweepPlotParetoArgs, str(reported))
    assert list((reported / "pareto").glob("*.png"))
