"""Samples of the system: from metrics pages of ours and of stock vLLM, from a status, and over a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from run_rig import Left, Server, phase, run, scenario

from loadtest.run.live import acceptance_length
from loadtest.run.processor_time import processor_time_s
from loadtest.run.readings import Page, SwapHistory, sample_of
from wire.control import AdminStatus, SwapReport

OURS = """
# HELP paceline_verify_steps_total Verify steps with at least one proposal.
paceline_verify_steps_total{draft_version="3",tenant="a",domain="code"} 10
paceline_verify_steps_total{draft_version="3",tenant="b",domain="code"} 5
paceline_verify_steps_total{draft_version="4",tenant="a",domain="code"} 2
paceline_verify_steps_total{draft_version="4",tenant="a",domain="chat"} 1
paceline_accepted_tokens_total{draft_version="3",position="1",tenant="a",domain="code"} 4
paceline_accepted_tokens_total{draft_version="3",position="0",tenant="a",domain="code"} 7
paceline_accepted_tokens_total{draft_version="3",position="0",tenant="b",domain="code"} 1
paceline_proposed_tokens_total{draft_version="3",position="0",tenant="a",domain="code"} 10
paceline_proposed_tokens_total{draft_version="3",position="1",tenant="a",domain="code"} 9
paceline_proposed_tokens_total{draft_version="4",position="0",tenant="a",domain="chat"} 1
paceline_accepted_tokens_created{draft_version="3",position="0",tenant="b",domain="code"} 1e9
paceline_routed_total{path="kv_reuse",reason="x"} 2
paceline_routed_total{path="kv_reuse",reason="y"} 3
paceline_active_draft_version 4
paceline_engine_ready{engine="engine-0"} 1
paceline_engine_ready{engine="engine-1"} 0
paceline_learner_loss 0.5
paceline_learner_steps_total 20
vllm:num_requests_running{engine="engine-0",model_name="m"} 6
vllm:num_requests_waiting{engine="engine-0",model_name="m"} 1
vllm:kv_cache_usage_perc{engine="engine-0",model_name="m"} 0.25
vllm:prompt_tokens_total{engine="engine-0"} 100
vllm:prompt_tokens_total{engine="engine-1"} 11
vllm:generation_tokens_total{engine="engine-0"} 50
"""
STOCK = """
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 25
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 6
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 2
vllm:num_requests_running{engine="0",model_name="m"} 1
vllm:prompt_tokens_total{engine="0"} 9
"""


def sample(text: str, **more: Any) -> Any:
    return sample_of(Page(text), None, at_s=1.0, cpu_s={}, gpu_s={}, swaps=[], **more)


def test_a_page_of_ours_is_read_by_domain_and_version() -> None:
    found = sample(OURS)
    assert found.steps == {"code": {"3": 15, "4": 2}, "chat": {"4": 1}}
    assert found.accepted == {"code": {"3": [8, 4]}}
    assert found.proposed == {"code": {"3": 19}, "chat": {"4": 1}}
    assert found.kv_paths == {"kv_reuse": 5}
    assert (found.active_version, found.learner_loss, found.learner_steps) == (4, 0.5, 20)
    assert (found.prompt_tokens, found.completion_tokens) == (111, 50)
    assert (found.engines["engine-0"].num_running, found.engines["engine-0"].kv_usage) == (6, 0.25)
    assert [(name, engine.ready, engine.num_waiting) for name, engine in found.engines.items()] == [
        ("engine-0", True, 1),
        ("engine-1", False, None),
    ]


def test_a_page_of_stock_vllm_has_acceptance_without_versions() -> None:
    found = sample(STOCK)
    assert (found.steps, found.accepted, found.proposed) == ({"": {"": 10}}, {"": {"": [6, 2]}}, {"": {"": 25}})
    assert (found.active_version, found.kv_paths, found.learner_steps) == (None, {}, None)
    assert found.engines["0"].ready


def test_a_page_of_another_server_leaves_everything_empty() -> None:
    found = sample("python_gc_objects_collected_total 4\n<html>")
    assert (found.steps, found.engines, found.prompt_tokens) == ({}, {}, 0)


def test_acceptance_length_is_of_what_lies_between_two_samples() -> None:
    assert acceptance_length(sample(""), sample(OURS)) == pytest.approx(1 + 12 / 18)
    assert acceptance_length(sample(OURS), sample(OURS)) is None


def swap(started_at_s: float, version: int, duration_ms: float = 500) -> SwapReport:
    return SwapReport(
        version=version,
        previous=version - 1,
        trigger="activate",
        outcome="committed",
        reason="",
        forced=False,
        started_at_s=started_at_s,
        duration_ms=duration_ms,
    )


def status(*swaps: SwapReport) -> AdminStatus:
    empty = json.loads(EMPTY_STATUS)
    return msgspec.convert({**empty, "swaps": msgspec.to_builtins(list(swaps))}, AdminStatus)


EMPTY_STATUS = json.dumps(
    {
        **{"schema_version": 1, "ready": True, "reason": "", "uptime_s": 1.0, "active_version": 5, "previous_version": None},
        **{"floor_version": 0, "rolled_back_versions": [], "engines": [], "swaps": [], "acceptance": None},
        "canary": {"state": "idle"},
        "learner": {"alive": False, "paused": False, "age_s": None, "report": None},
        "capture": {"rate": 1.0, "num_captured_rows": 0, "num_dropped_rows": {}},
        "traffic": dict.fromkeys(
            ["num_in_flight", "num_served", "num_failed", "num_refused", "num_disconnected", "num_verified_tokens"], 0
        ),
    }
)


def test_each_swap_is_told_once_on_the_runs_clock_and_earlier_ones_not_at_all() -> None:
    history = SwapHistory(1000.0)
    assert [(one.at_s, one.version) for one in history.new(status(swap(990.0, 1), swap(1002.5, 2)))] == [(2.5, 2)]
    assert history.new(status(swap(1002.5, 2))) == []
    (again,) = history.new(status(swap(1002.5, 2), swap(1004.0, 3)))
    assert (again.at_s, again.duration_s, again.version, again.previous) == (4.0, 0.5, 3, 2)


def test_a_swap_that_began_before_the_run_and_ended_in_it_is_told() -> None:
    (one,) = SwapHistory(1000.0).new(status(swap(999.0, 1, duration_ms=3000)))
    assert (one.at_s, one.duration_s) == (-1.0, 3.0)


@pytest.mark.rig
def test_processor_time_counts_children_and_leaves_out_who_is_gone() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    code = f"import subprocess, sys, time; subprocess.run([sys.executable, '-c', {burn!r}]); print('x', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            found = processor_time_s({"one": process.pid, "gone": 2**22 + 1})
        finally:
            process.kill()
    assert list(found) == ["one"]
    assert found["one"] >= 0.29


def watched(tmp_path: Path, server: Server, *routes: web.RouteDef, **more: Any) -> Left:
    lane = {"phase": [phase({"kind": "poisson", "rate_per_s": 5}, 2.2)]}
    return run(scenario(lane, **more), server, tmp_path / "run", *routes)


@pytest.mark.rig
def test_a_run_samples_the_system_once_a_second_and_once_more_at_its_end(tmp_path: Path) -> None:
    left = watched(tmp_path, Server(metrics=OURS))
    assert len(left.samples) >= 3
    assert left.samples[0].at_s < 0.9
    assert all(after.at_s > before.at_s for before, after in zip(left.samples, left.samples[1:], strict=False))
    assert left.samples[-1].at_s >= (left.run.duration_s or 0)
    assert {one.active_version for one in left.samples} == {4}


@pytest.mark.rig
def test_a_server_without_metrics_is_tested_all_the_same(tmp_path: Path) -> None:
    left = watched(tmp_path, Server())
    assert left.samples == []
    assert left.run.is_valid


@pytest.mark.rig
def test_a_systems_status_gives_its_swaps_once(tmp_path: Path) -> None:

    history = [swap(time.time() + 3600.0, 6)]

    async def answer(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer operator"
        return web.Response(body=msgspec.json.encode(status(*history)), content_type="application/json")

    left = watched(tmp_path, Server(metrics=OURS), web.get("/admin/status", answer))
    told = [one for sample in left.samples for one in sample.swaps]
    assert [(one.version, one.outcome) for one in told] == [(6, "committed")]


@pytest.mark.rig
def test_the_processes_of_a_local_system_are_watched(tmp_path: Path) -> None:
    system_file = tmp_path / "system.json"
    system_file.write_text(json.dumps({"processes": {"gateway": {"pid": os.getpid()}, "learner": {"pid": None}}}))
    lane = {"phase": [phase({"kind": "poisson", "rate_per_s": 5}, 0.5)]}
    left = run(scenario(lane), Server(metrics=OURS), tmp_path / "run", system_file=system_file)
    assert all(list(one.cpu_s) == ["gateway"] and one.cpu_s["gateway"] > 0 for one in left.samples)
    assert left.samples


def test_what_a_page_cannot_mean_is_left_out() -> None:
    odd = """
paceline_active_draft_version NaN
paceline_learner_steps_total 1e300
paceline_learner_loss +Inf
vllm:spec_decode_num_drafts_total{engine="0"} 10
vllm:spec_decode_num_drafts_total{engine="1"} NaN
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="first"} 6
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="-1"} 6
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="999999999999"} 6
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 4
"""
    found = sample(odd)
    assert (found.active_version, found.learner_steps, found.learner_loss) == (None, None, None)
    assert (found.steps, found.accepted) == ({"": {"": 10.0}}, {"": {"": [0.0, 4.0]}})
    assert msgspec.json.decode(msgspec.json.encode(found), type=type(found)) == found
