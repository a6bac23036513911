"""`paceline bench run` as a person starts it: against mock engines behind the real gateway, and against any other server."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadtest.mock_engine import Pace
from loadtest.processes import running_process
from loadtest.recital import MODEL, is_recital
from loadtest.records import RequestRecord, RunRecord, SystemSample
from loadtest.report.command import report
from loadtest.rig import OPERATOR_TOKEN, gateway_config, mock_addresses, running_gateway, running_mocks
from loadtest.run.command import left_out
from wire.ports import free_ports

SCENARIO = """
name = "both"
what = "An open loop of single requests beside a closed loop of conversations."
max_dispatch_lag_p99_ms = 5000
action = [{at_s = 1, do = "drain", process = "engine-1"}]
[[lane]]
name = "users"
max_tokens = 12
[[lane.phase]]
name = "rising"
duration_s = 3
arrivals = {kind = "poisson", rate_per_s = 4, end_rate_per_s = 12}
traffic = {human_eval = 1}
[[lane]]
name = "talkers"
max_tokens = 12
turns = {number = 3, mean_think_time_s = 0.1}
[[lane.phase]]
name = "steady"
duration_s = 3
arrivals = {kind = "closed", concurrency = 2}
traffic = {human_eval = 1}
split = "heldout"
"""

pytestmark = pytest.mark.rig


def bench_run(scenario: Path, *words: str, preexec_fn: Callable[[], None] | None = None) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "launch.cli", "bench", "run", str(scenario), *words]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=preexec_fn)


def written(path: Path) -> Path:
    path.write_text(SCENARIO)
    return path


def chat(number: int) -> str:
    """A line of a file of conversations."""
    return json.dumps({"messages": [{"role": "user", "content": f"question {number}"}]}) + "\n"


def local_system(state_dir: Path, gateway_url: str, admin_port: int, pids: dict[str, int]) -> None:
    """What `paceline up` leaves for others to find."""
    (state_dir / "run").mkdir(parents=True)
    (state_dir / "run" / "operator.token").write_text(OPERATOR_TOKEN)
    urls = {"gateway_url": gateway_url, "admin_url": f"http://127.0.0.1:{admin_port}"}
    processes = {name: {"pid": pid} for name, pid in pids.items()}
    (state_dir / "run" / "system.json").write_text(json.dumps({**urls, "processes": processes}))


def test_a_run_through_the_real_gateway_is_whole(tmp_path: Path) -> None:
    async def run() -> tuple[int, str]:
        addresses = mock_addresses(2, Pace(first_token_s=0.02, between_tokens_s=0.01))
        (admin_port,) = free_ports(1)
        async with (
            running_mocks(addresses) as pids,
            running_gateway(gateway_config(addresses), admin_port=admin_port) as url,
        ):
            local_system(tmp_path, url, admin_port, {f"engine-{index}": pid for index, pid in enumerate(pids)})
            words = ["--state", str(tmp_path), "--out", str(tmp_path / "out")]
            chats = tmp_path / "chats.jsonl"
            chats.write_text('{"messages": 7}\n' + "".join(map(chat, range(16))))
            scenario = written(tmp_path / "s.toml")
            scenario.write_text(SCENARIO.replace("{human_eval = 1}", f"{{human_eval = 1, {json.dumps(str(chats))} = 1}}", 1))
            process = bench_run(scenario, *words)
            output, errors = await asyncio.to_thread(process.communicate)
            return process.returncode, output + errors

    code, output = asyncio.run(run())
    assert code == 0, output
    run_record = msgspec.json.decode((tmp_path / "out" / "run.json").read_bytes(), type=RunRecord)
    assert (run_record.model, run_record.is_valid) == (MODEL, True)
    assert run_record.num_broken == {str(tmp_path / "chats.jsonl"): 1}
    assert [(one.do, one.process, one.problem) for one in run_record.actions] == [("drain", "engine-1", None)]
    requests = lines(tmp_path / "out" / "requests.jsonl", RequestRecord)
    assert {one.outcome for one in requests} == {"ok"}
    assert {one.lane for one in requests} == {"users", "talkers"}
    assert all(is_recital(one.text, 12) and one.request_id and one.num_completion_tokens == 12 for one in requests)
    turns = Counter(one.turn for one in requests if one.lane == "talkers")
    assert turns[0] >= turns[1] >= turns[2] > 0
    samples = lines(tmp_path / "out" / "timeline.jsonl", SystemSample)
    assert {name: engine.draining for name, engine in samples[-1].engines.items()} == {"engine-0": False, "engine-1": True}
    assert not samples[0].engines["engine-1"].draining
    assert sum(samples[-1].kv_paths.values()) >= len(requests)
    assert samples[-1].active_version == 0
    assert samples[-1].cpu_s["engine-0"] > samples[0].cpu_s["engine-0"] > 0


def lines(path: Path, kind: Any) -> list[Any]:
    return [msgspec.json.decode(line, type=kind) for line in path.read_bytes().splitlines()]


def test_actions_without_an_admin_api_are_refused_before_anything_is_sent(tmp_path: Path) -> None:
    async def run() -> tuple[int, str]:
        (port,) = free_ports(1)
        url = f"http://127.0.0.1:{port}"
        argv = [sys.executable, "-m", "loadtest.canned_server", "--port", str(port)]
        async with running_process(argv, ready_url=f"{url}/v1/models"):
            process = bench_run(written(tmp_path / "s.toml"), "--url", url, "--out", str(tmp_path / "out"))
            _, errors = await asyncio.to_thread(process.communicate)
            return process.returncode, errors

    code, errors = asyncio.run(run())
    assert code == 2
    assert "drain" in errors
    assert not (tmp_path / "out").exists()


def test_ctrl_c_keeps_what_was_measured_and_says_so(tmp_path: Path) -> None:
    async def run() -> tuple[int, str]:
        (port,) = free_ports(1)
        url = f"http://127.0.0.1:{port}"
        argv = [sys.executable, "-m", "loadtest.canned_server", "--port", str(port), "--between-tokens-s", "0.01"]
        async with running_process(argv, ready_url=f"{url}/v1/models"):
            process = bench_run(
                written(tmp_path / "s.toml"), "--url", url, "--out", str(tmp_path / "out"), "--set", "action=[]"
            )
            deadline_s = time.monotonic() + 60
            requests = tmp_path / "out" / "requests.jsonl"
            while not (requests.is_file() and requests.stat().st_size) and time.monotonic() < deadline_s:
                await asyncio.sleep(0.05)
            os.kill(process.pid, signal.SIGINT)
            output, errors = await asyncio.to_thread(process.communicate)
            return process.returncode, output + errors

    code, output = asyncio.run(run())
    assert code == 1, output
    assert "INVALID: interrupted" in output
    run_record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert run_record["was_interrupted"]
    num_lines = len((tmp_path / "out" / "requests.jsonl").read_bytes().splitlines())
    assert num_lines == sum(run_record["num_requests"].values()) > 0


def test_a_run_whose_disk_is_full_ends_and_its_report_shows_what_was_kept(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))

    async def run() -> tuple[int, str]:
        (port,) = free_ports(1)
        url = f"http://127.0.0.1:{port}"
        argv = [sys.executable, "-m", "loadtest.canned_server", "--port", str(port)]
        async with running_process(argv, ready_url=f"{url}/v1/models"):
            scenario = written(tmp_path / "s.toml")
            scenario.write_text(SCENARIO.replace("duration_s = 3", "duration_s = 600"))
            words = ["--url", url, "--out", str(tmp_path / "out"), "--set", "action=[]"]
            process = bench_run(scenario, *words, preexec_fn=limit)
            output, errors = await asyncio.to_thread(process.communicate)
            return process.returncode, output + errors

    code, output = asyncio.run(run())
    assert code == 1, output
    assert "INVALID: cannot write to" in output
    assert "File too large" in output
    said: list[str] = []
    assert report(tmp_path / "out", None, said.append) == 1
    assert "File too large" in said[0]
    assert "0 answered whole" not in said[1]


@pytest.mark.parametrize(("num_records", "is_note"), [(50_000, True), (999, False), (None, False)])
def test_one_broken_record_of_a_large_corpus_is_only_a_note(num_records: int | None, is_note: bool) -> None:
    """Of traces nobody knows the number."""
    line = left_out("sharegpt", 1, num_records)
    assert line.startswith("note: ") == is_note
    assert ("broken" not in line) == is_note
