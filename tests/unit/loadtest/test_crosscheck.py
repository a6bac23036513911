"""The cross-check with other load testers: what is read of their results, what counts as apart, and what happens without them."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from loadtest.bars import crosscheck
from loadtest.bars.registry import Bench
from loadtest.crosscheck import aiperf, child, ours, vllm_bench
from loadtest.crosscheck.__main__ import main
from loadtest.crosscheck.numbers import COMPARED, Numbers, differences_pct, of_vllm_keys, read_json, worst_pct
from loadtest.crosscheck.turns import Tool, Turns, in_turn
from loadtest.crosscheck.workload import Workload, questions
from loadtest.environments import environment_dir
from loadtest.mock_engine import Pace
from loadtest.processes import SystemUnderTestError
from loadtest.recital import MODEL
from loadtest.rig import mock_addresses, running_mocks
from loadtest.run.conduct import Provenance
from loadtest.sources import load
from loadtest.traffic import is_held_out

RESULTS = Path(__file__).parent / "crosscheck_results"
"""Of 6 requests of 8 tokens, two at a time, to a mock engine that takes 200 ms for the first token and 20 ms for each other."""

RUN = Numbers(
    num_requests=10,
    prompt_tokens=100.0,
    output_tokens=30.0,
    ttft_mean_ms=200.0,
    ttft_median_ms=190.0,
    tpot_mean_ms=20.0,
    tokens_per_s=50.0,
)


def workload(url: str = "http://127.0.0.1:9", *, max_tokens: int = 8) -> Workload:
    return Workload(
        url=url, model=MODEL, tokenizer_dir=Path("/tokenizer"), prompts=questions(), concurrency=2, max_tokens=max_tokens
    )


def result(name: str) -> dict[str, Any]:
    return read_json(RESULTS / f"{name}.json")


@pytest.mark.parametrize(("name", "read"), [("vllm_bench", vllm_bench.read), ("aiperf", aiperf.read)])
def test_a_result_of_another_tool_is_read_in_our_units(name: str, read: Any) -> None:
    found = read(result(name))
    assert (found.num_requests, found.prompt_tokens, found.output_tokens) == (6, 8.0, 8.0)
    assert found.ttft_mean_ms == pytest.approx(203, abs=3)
    assert found.ttft_median_ms == pytest.approx(203, abs=3)
    assert found.tpot_mean_ms == pytest.approx(20, abs=0.5)
    assert found.tokens_per_s == pytest.approx(2 * 8 / 0.34, rel=0.05)


def test_each_number_is_read_from_its_own_place() -> None:
    told = result("aiperf")
    told["time_to_first_token"] |= {"avg": 1.0, "p50": 2.0}
    told["inter_token_latency"]["avg"] = 3.0
    told["output_token_throughput"]["avg"] = 4.0
    of_aiperf = aiperf.read(told)
    told = result("vllm_bench") | {"mean_ttft_ms": 1.0, "median_ttft_ms": 2.0, "mean_tpot_ms": 3.0, "output_throughput": 4.0}
    for found in (of_aiperf, of_vllm_keys(told)):
        assert [getattr(found, name) for name in COMPARED] == [1.0, 2.0, 3.0, 4.0]


def test_a_result_with_failed_requests_is_refused() -> None:
    with pytest.raises(SystemUnderTestError, match="2 of 8 requests failed"):
        vllm_bench.read(result("vllm_bench") | {"failed": 2})
    with pytest.raises(SystemUnderTestError, match="404"):
        aiperf.read(result("aiperf") | {"error_summary": [{"error_details": {"code": 404}, "count": 1}]})
    with pytest.raises(SystemUnderTestError, match="cancelled"):
        aiperf.read(result("aiperf") | {"was_cancelled": True})


@pytest.mark.parametrize("value", [None, 0.0, float("nan"), "fast", True])
def test_a_number_that_is_missing_or_measures_nothing_is_refused(value: object) -> None:
    with pytest.raises(SystemUnderTestError, match="mean_ttft_ms"):
        of_vllm_keys(result("vllm_bench") | {"mean_ttft_ms": value})
    with pytest.raises(SystemUnderTestError, match=r"time_to_first_token\.avg"):
        aiperf.read(result("aiperf") | {"time_to_first_token": {"avg": value}})


def test_a_result_file_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemUnderTestError, match=r"absent\.json holds no result"):
        read_json(tmp_path / "absent.json")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(SystemUnderTestError, match="a JSON object is wanted"):
        read_json(tmp_path / "list.json")


def test_a_difference_is_in_percent_of_theirs_between_the_means_of_the_runs() -> None:
    slower = dataclasses.replace(RUN, ttft_mean_ms=240.0)
    found = differences_pct([RUN, slower], [dataclasses.replace(RUN, tokens_per_s=62.5)] * 2)
    assert found == pytest.approx({"ttft_mean_ms": 10.0, "ttft_median_ms": 0.0, "tpot_mean_ms": 0.0, "tokens_per_s": -20.0})
    assert worst_pct(found) == pytest.approx(20.0)


def test_the_bar_is_the_worst_difference_and_shows_every_run() -> None:
    turns = Turns("theirs", [RUN, RUN], [dataclasses.replace(RUN, tpot_mean_ms=16.0), RUN])
    measured = crosscheck.measured(turns)
    assert measured.value == pytest.approx(100 * (20 / 18 - 1))
    assert measured.detail["difference_pct"]["tpot_mean_ms"] == pytest.approx(11.11)
    assert [run["tpot_mean_ms"] for run in measured.detail["theirs"]] == [16.0, 20.0]
    assert any("tpot_mean_ms" in line and "16" in line and "+11.11 %" in line for line in turns.table())


def test_all_load_testers_send_the_same_prompts(tmp_path: Path) -> None:
    texts = questions()
    assert len(texts) > 20
    assert not any(is_held_out(text) for text in texts)
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"messages": [{"role": "user", "content": text}]}) + "\n" for text in texts)
    )
    assert [prompt.messages[0]["content"] for prompt in load(str(tmp_path / "prompts.jsonl")).train] == list(texts)
    assert workload().texts(len(texts) + 1) == [*texts, texts[0]]
    assert [entry["conversations"][0]["value"] for entry in vllm_bench.sharegpt(list(texts))] == list(texts)


def test_all_load_testers_are_told_the_same_body_and_concurrency(tmp_path: Path) -> None:
    shown_end = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    body = {"max_tokens": 8, "temperature": 0.0, **shown_end}
    for words, option in (
        (vllm_bench.words(workload(), 6, tmp_path / "prompts"), "--max-concurrency"),
        (aiperf.words(workload(), 6, tmp_path / "prompts"), "--concurrency"),
    ):
        after = dict(itertools.pairwise(words))
        assert after[option] == "2"
        assert json.loads(after.get("--extra-body") or after["--extra-inputs"]) == body
        assert (after.get("--num-prompts") or after["--request-count"]) == "6"
    (lane,) = ours.scenario(workload(), 1.0, tmp_path / "prompts.jsonl").lane
    assert (lane.max_tokens, lane.temperature, lane.options) == (8, 0.0, shown_end)
    assert lane.phase[0].arrivals.model_dump() == {"kind": "closed", "concurrency": 2}


def test_without_vllm_the_bar_says_what_to_install_and_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_arguments: object) -> None:
        raise AssertionError("a system was started")

    monkeypatch.setattr(crosscheck, "running_system", start)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(SystemUnderTestError, match=r"vLLM is not in this environment.*requirements/cpu.lock"):
        asyncio.run(crosscheck.vllm_bench(Bench((), Provenance(None, {}, {}))))


@pytest.mark.rig
def test_an_aiperf_that_cannot_be_installed_is_an_error_with_pips_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    monkeypatch.setattr(aiperf, "LOCK", tmp_path / "absent.lock")
    with pytest.raises(SystemUnderTestError, match=r"(?s)ended with code.*absent\.lock"):
        aiperf.prepare()
    (environment_dir("aiperf-0.13.0") / "installed").touch()
    aiperf.prepare()


def test_every_package_of_aiperfs_environment_is_pinned() -> None:
    lines = [line for line in aiperf.LOCK.read_text().splitlines() if not line.startswith("#")]
    assert f"aiperf=={aiperf.VERSION}" in lines
    assert [line for line in lines if line.count("==") != 1] == []
    assert len(lines) > 100


@pytest.mark.rig
def test_a_load_tester_that_fails_is_reported_with_its_last_words(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", "raise SystemExit('no such server')"]
    with pytest.raises(SystemUnderTestError, match=r"(?s)ended with code 1.*no such server"):
        asyncio.run(child.run_to_end(argv, tmp_path, cores=()))


@pytest.mark.rig
def test_a_load_tester_that_does_not_end_is_killed_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "_DEADLINE_S", 3.0)
    argv = ["sh", "-c", "sleep 60 & echo $! > child.pid; wait"]
    with pytest.raises(SystemUnderTestError, match="did not end within 3 s"):
        asyncio.run(child.run_to_end(argv, tmp_path, cores=()))
    pid = int((tmp_path / "child.pid").read_text())
    state = Path(f"/proc/{pid}/stat")
    wait_until(lambda: not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z", "for its child's end")


@pytest.mark.rig
def test_a_load_tester_runs_on_the_cores_it_is_given(tmp_path: Path) -> None:
    core = max(os.sched_getaffinity(0))
    argv = [sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"]
    asyncio.run(child.run_to_end(argv, tmp_path, cores={core}))
    assert (tmp_path / "output.log").read_text().strip() == f"{{{core}}}"


@pytest.mark.rig
def test_two_load_testers_take_turns_with_equally_many_requests_and_agree() -> None:
    asked: list[int] = []

    async def measure(given: Workload, num_requests: int, directory: Path) -> Numbers:
        asked.append(num_requests)
        return await ours.measure(given, 1.0, directory)

    async def run() -> Turns:
        addresses = mock_addresses(1, Pace(first_token_s=0.2, between_tokens_s=0.02))
        async with running_mocks(addresses):
            said: list[str] = []
            turns = await in_turn(
                Tool("ours again", lambda: None, measure), workload(addresses[0].url, max_tokens=5), 1.0, said.append
            )
            assert [line.split(":")[0] for line in said] == [
                *("1 of 4, ours", "2 of 4, ours again", "3 of 4, ours again", "4 of 4, ours")
            ]
            return turns

    turns = asyncio.run(run())
    assert asked == [turns.ours[0].num_requests] * 2
    for one in (*turns.ours, *turns.theirs):
        assert one.output_tokens == 5
        assert one.ttft_mean_ms >= 200
        assert one.tpot_mean_ms == pytest.approx(20, rel=0.5)


@pytest.mark.rig
def test_a_server_that_refuses_is_reported_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vllm", "--url", "http://127.0.0.1:9", "--tokenizer", "/tokenizer"]) == 2
    assert "Cannot connect to host 127.0.0.1:9" in capsys.readouterr().err
