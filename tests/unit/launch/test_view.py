from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from sample_messages import learner_report

from launch.demo import farewell, is_over, what_comes_next
from launch.detached import what_it_waits_for
from launch.rundir import LaunchError, RunDir
from launch.stages import stage
from launch.view import TokenRate, gauge, read_status, render, summary, swaps_committed, why_silent
from wire.control import (
    AcceptanceView,
    AdminStatus,
    CanaryView,
    CaptureView,
    CommitReport,
    LearnerReport,
    LearnerView,
    SwapReport,
    TrafficView,
)
from wire.spec import SCHEMA_VERSION

SYSTEM = {"pid": 1, "pid_created_at_s": 0.0, "gateway_url": "http://127.0.0.1:1", "admin_url": "http://127.0.0.1:2"}


def report() -> LearnerReport:
    return learner_report(
        state="training",
        num_steps=42,
        loss=1.25,
        tokens_per_s=180.0,
        num_tokens_seen=9000,
        buffer_requests=10,
        buffer_tokens=1500,
        buffer_oldest_s=30.0,
        capture_lag_s=0.1,
        num_received_rows=2000,
        simulated_al=1.4,
        num_published=1,
        num_gate_decisions={"accepted": 1},
    )


def status(**changes: Any) -> AdminStatus:
    swap = SwapReport(
        version=1,
        previous=0,
        trigger="activate",
        outcome="committed",
        reason="",
        forced=False,
        started_at_s=0.0,
        duration_ms=400.0,
        commits={"engine-0": CommitReport(version=1, previous=0, apply_ms=17.4, rpc_ms=90.0)},
    )
    plain = AdminStatus(
        schema_version=SCHEMA_VERSION,
        ready=True,
        reason="",
        uptime_s=61.0,
        active_version=1,
        previous_version=0,
        floor_version=0,
        rolled_back_versions=[],
        engines=[],
        canary=CanaryView(state="watching"),
        swaps=[swap],
        learner=LearnerView(alive=True, paused=False, age_s=0.5, report=report()),
        capture=CaptureView(rate=1.0, num_captured_rows=2000, num_dropped_rows={"queue_full": 3}),
        acceptance=AcceptanceView(
            draft_version=1, acceptance_length=1.62, per_position=[0.4, 0.15, 0.07], num_verify_steps=900
        ),
        traffic=TrafficView(
            num_in_flight=4, num_served=33, num_failed=0, num_refused=1, num_disconnected=0, num_verified_tokens=5000
        ),
    )
    return msgspec.structs.replace(plain, **changes)


def text_of(shown: AdminStatus) -> str:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(shown, 71.5))
    return console.export_text()


def test_the_view_shows_what_matters() -> None:
    text = text_of(status())
    for words in ("71.5", "1.62", "40%", "training", "1.250", "committed", "17", "dropped, queue_full", "watching"):
        assert words in text


def test_the_view_bears_a_system_that_has_measured_nothing() -> None:
    text = text_of(
        status(acceptance=None, swaps=[], learner=LearnerView(alive=False, paused=False, age_s=None, report=None), ready=False)
    )
    assert "not measured yet" in text
    assert "not heard of yet" in text


def test_the_plain_line_tells_the_same() -> None:
    line = summary(status(), 71.5)
    for words in ("served 33", "72 tok/s", "draft 1 AL 1.62 (0.40 0.15 0.07)", "loss 1.250", "swaps 1", "dropped rows 3"):
        assert words in line
    assert "\n" not in line


def test_the_rate_follows_the_last_seconds_and_a_restart() -> None:
    rate = TokenRate(window_s=10.0)
    assert rate.update(0.0, 100) == 0.0
    assert rate.update(5.0, 600) == pytest.approx(100.0)
    assert rate.update(20.0, 600) == 0.0
    assert rate.update(21.0, 10) == 0.0
    assert rate.update(22.0, 60) == pytest.approx(50.0)


def test_a_gauge_stays_within_its_width() -> None:
    assert {len(gauge(share)) for share in (-1.0, 0.0, 0.5, 1.0, 2.0)} == {29}


def test_a_status_of_a_newer_release_is_read_as_far_as_it_is_known() -> None:
    class Client:
        def get(self, _path: str) -> dict[str, Any]:
            return {**msgspec.to_builtins(status()), "added_later": 1}

    assert read_status(Client()) == status()  # type: ignore[arg-type]


def test_the_demo_ends_a_minute_after_the_second_swap_or_when_told() -> None:
    assert not is_over(100.0, None, None)
    assert not is_over(100.0, None, 59.0)
    assert is_over(100.0, None, 61.0)
    assert is_over(1201.0, None, None)
    assert is_over(120.0, 2.0, None)
    assert not is_over(119.0, 2.0, 90.0)


def test_the_demo_says_what_comes_next() -> None:
    assert "waiting for the first better draft" in what_comes_next(status(swaps=[]), None)
    assert what_comes_next(status(), 5.0).startswith("1 swap so far")
    assert swaps_committed(status()) == 1


def test_the_farewell_can_be_pasted() -> None:
    text = farewell("http://127.0.0.1:8000", "tiny", ["--set", "state.dir=/s"])
    assert "curl http://127.0.0.1:8000/v1/chat/completions" in text
    assert "paceline down --set state.dir=/s" in text


def test_waiting_says_for_what(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.create()
    engine = {"engine-0": {"role": "engine", "pid": 1}}
    with_gateway = {"processes": {**engine, "gateway": {"role": "gateway", "pid": 2}}}
    assert what_it_waits_for({"processes": engine}, [], run_dir) == "engine-0 imports its libraries"
    assert "gateway" in what_it_waits_for(with_gateway, [], run_dir)
    assert what_it_waits_for({}, ["target: writing weights"], run_dir) == "target: writing weights"


def test_an_engine_s_stage_is_the_last_its_log_has_reached(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("INFO Starting to load model /m...\nINFO Loading drafter model...\n")
    assert stage(log) == "loads the draft"
    log.write_text(log.read_text() + "INFO Warming up model for the compilation...\n")
    assert stage(log).startswith("compiles")


def test_a_silent_gateway_of_a_starting_system_is_no_error(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.create()
    error = LaunchError("connection refused")
    assert why_silent(run_dir, error) == "connection refused"
    lock = run_dir.lock()
    try:
        engine = {"engine-0": {"role": "engine", "pid": 1}}
        run_dir.write_system(SYSTEM | {"is_ready": False, "processes": engine})
        assert why_silent(run_dir, error) == "the system is starting: engine-0 imports its libraries"
        run_dir.write_system(SYSTEM | {"is_ready": True, "processes": engine})
        assert why_silent(run_dir, error) == "connection refused"
        run_dir.system_file.write_text("{")
        assert why_silent(run_dir, error) == "connection refused"
    finally:
        os.close(lock)


@pytest.mark.parametrize("width", [80, 120])
def test_no_line_of_the_view_is_cut(width: int) -> None:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(render(status(), 12.0, width=width))
    text = console.export_text()
    assert "…" not in text
    assert all(word in text for word in ("requests served", "position 1", "simulated AL"))


def test_refused_wishes_are_counted_and_not_listed() -> None:
    committed = status().swaps[0]
    refused = msgspec.structs.replace(committed, version=7, outcome="refused", reason="stale", commits={})
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(render(status(swaps=[committed, refused]), 12.0))
    text = console.export_text()
    assert "swaps (1 more refused)" in text
    assert "stale" not in text
