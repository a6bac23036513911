from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import samples
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file
from waiting import wait_until

from launch.config import SystemConfig
from loadtest.bars import command, commits, learning, spoiled
from loadtest.bars.load import Load
from loadtest.bars.lone_engines import Sides
from loadtest.bars.registry import Bar, Bench, Measured, UnknownBar, load, select
from loadtest.client import StreamResult
from loadtest.run.conduct import Provenance
from loadtest.statistics import CommitGaps
from loadtest.system import SPECULATION, SystemUnderTestError, speculating, up_words, without_options
from loadtest.traffic import Prompt
from wire.artifact import WEIGHTS_FILE, DraftManifest, verify_artifact
from wire.errors import ArtifactError
from wire.spec import file_sha256
from wire.store import DraftStore

BENCH = Bench((), Provenance("c1", {"torch": "2"}, {}))


def bar(comparison: str = "at_least", value: float = 2.0) -> Bar:
    return Bar(name="P9.x", bar=value, comparison=comparison, unit="u", what="w", function="m:f")  # type: ignore[arg-type]


@pytest.mark.parametrize("entry", load(), ids=lambda entry: entry.name)
def test_every_bar_names_a_function_that_exists(entry: Bar) -> None:
    module, _, function = entry.function.partition(":")
    assert callable(getattr(importlib.import_module(f"loadtest.bars.{module}"), function))
    assert entry.comparison in {"at_least", "at_most", "equals"}
    assert entry.what
    assert entry.unit


@pytest.mark.parametrize(
    ("comparison", "value", "is_met"),
    [
        ("at_least", 2.0, True),
        ("at_least", 1.9, False),
        ("at_most", 2.0, True),
        ("at_most", 2.1, False),
        ("equals", 2.0, True),
        ("equals", 0.0, False),
        ("at_most", None, False),
        ("at_most", float("nan"), False),
    ],
)
def test_a_value_meets_its_bar_or_not(comparison: str, value: float | None, is_met: bool) -> None:
    assert bar(comparison).is_met(value) is is_met


def test_sides_are_compared_round_by_round_with_both_engines_of_each() -> None:
    sides = Sides(ours=[90.0, 110.0, 47.0, 49.0], stock=[100.0, 100.0, 52.0, 48.0])
    ratio = sides.ratio()
    assert ratio.num_pairs == 2
    assert ratio.mean == pytest.approx((1.0 + 0.96) / 2)
    assert sides.detail()["cost_pct"] == pytest.approx(2.0)


def test_bars_are_chosen_by_part_or_name() -> None:
    everything = load()
    assert select(everything, []) == list(everything)
    assert {chosen.name.split(".")[0] for chosen in select(everything, ["P1"])} == {"P1"}
    assert [chosen.name for chosen in select(everything, ["P1.capture_cost_pct", "P1.capture_cost_pct"])] == [
        "P1.capture_cost_pct"
    ]
    with pytest.raises(UnknownBar, match=r"P1\.al_heldout"):
        select(everything, ["P1.no_such"])


def test_the_drill_is_a_choice_of_bars() -> None:
    assert [chosen.name for chosen in select(load(), command.DRILL)] == list(command.DRILL)


def test_the_exit_code_says_whether_every_bar_is_met(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def fake(function: str, _bench: Bench) -> dict[str, Measured]:
        asked.append(function)
        return {"commit_failures": Measured(0), "commit_changed": Measured(1), "commit_gap_median_ms": Measured(3.0)}

    monkeypatch.setattr(command, "measure", fake)
    names = ["P1.commit_failures", "P1.commit_gap_median_ms"]
    assert command.bars(only=names, as_json=False, list_only=False, bench=BENCH) == 0
    assert asked == ["commits:exactness", "commits:stall"]
    assert command.bars(only=["P1.commit_changed"], as_json=False, list_only=False, bench=BENCH) == 1
    assert "FALLS SHORT  P1.commit_changed" in capsys.readouterr().out
    assert command.bars(only=["P1.commit_gap_p99_ms"], as_json=True, list_only=False, bench=BENCH) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["commit"], told["versions"]) == ("c1", {"torch": "2"})
    (row,) = told["bars"]
    assert (row["name"], row["measured"], row["is_met"]) == ("P1.commit_gap_p99_ms", None, False)
    assert command.bars(only=["nothing"], as_json=False, list_only=False, bench=BENCH) == 2


def test_a_system_that_does_not_start_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(_bench: Bench) -> dict[str, Measured]:
        raise SystemUnderTestError("no engine")

    monkeypatch.setattr(commits, "exactness", fail)
    values = command.measure("commits:exactness", BENCH)
    assert values["commit_failures"] == Measured(None, {"reason": "no engine"})
    assert len(values) == 2


@pytest.mark.parametrize("error", [aiohttp.ServerDisconnectedError(), ArtifactError("damaged")])
def test_a_system_that_breaks_off_while_it_is_measured_is_a_result(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    async def breaks(_bench: Bench) -> dict[str, Measured]:
        raise error

    monkeypatch.setattr(commits, "exactness", breaks)
    values = command.measure("commits:exactness", BENCH)
    assert {name: (value.value, bool(value.detail["reason"])) for name, value in values.items()} == {
        "commit_failures": (None, True),
        "commit_changed": (None, True),
    }


def test_commit_values_come_from_one_run() -> None:
    good = StreamResult("p", 0.0, status=200, token_ids=[1], is_complete=True, finish_reason="length")
    other = StreamResult("p", 0.0, status=200, token_ids=[2], is_complete=True, finish_reason="length")
    broken = StreamResult("p", 0.0, status=502, error="engine died")
    found = CommitGaps(extra_s=[0.01, 0.02, 0.2], control_s=0.1, step_s=0.1, num_beside_prefill=4, num_unobserved=0)
    run = commits.CommitRun("model", (), Load([good, other, broken]), found, {})
    values = commits.exactness_values(run, {"p": [1]})
    assert values["commit_failures"].value == 1
    assert values["commit_changed"].value == 1
    assert commits.stall_values(run)["commit_gap_median_ms"].value is None
    values = commits.stall_values(replace(run, load=Load([good])))
    assert values["commit_gap_median_ms"].value == pytest.approx(20.0)
    assert values["commit_gap_p99_ms"].value == pytest.approx(196.4 - 100.0)


def test_a_full_pass_is_worth_it_after_two_glances_above_the_goal() -> None:
    assert not learning.is_worth_a_full_pass([1.9])
    assert not learning.is_worth_a_full_pass([1.9, None, 1.9])
    assert learning.is_worth_a_full_pass([1.0, 1.8, 1.9])


def test_glances_go_round_the_held_out_problems() -> None:
    prompts = [Prompt(str(index), ()) for index in range(10)]
    assert [prompt.id for prompt in learning.glance(prompts, 2)] == ["8", "9", "0", "1"]


def test_options_are_removed_with_their_values() -> None:
    argv = ["python", "--a", "1", "--worker-cls", "x.Y", "--b", "--speculative-config", "{}"]
    assert without_options(argv, ["--worker-cls", "--speculative-config"]) == ["python", "--a", "1", "--b"]


def test_an_engine_without_speculation_is_not_asked_for_what_vllm_tells_of_speculation() -> None:
    argv = ["vllm", *speculating({"method": "ngram"}), "--x", "1"]
    assert argv[1:3] == ["--speculative-config", '{"method": "ngram"}']
    assert without_options(argv, SPECULATION) == ["vllm", "--x", "1"]


def test_a_measured_system_tells_of_every_verify_step_unless_it_is_told_otherwise() -> None:
    def told(*words: str) -> object:
        found = up_words(words, ["target.dtype=float32"])
        assert found[::2] == ["--set"] * (len(found) // 2)
        return SystemConfig.load([], found[1::2]).engine["per_request_spec_decode_metrics"]

    assert told() == "detailed"
    assert told("--set", "engine.per_request_spec_decode_metrics=none") == "none"


@pytest.fixture
def store(tmp_path: Path) -> DraftStore:
    store = DraftStore(tmp_path)

    def fill(directory: Path, version: int) -> None:
        save_file({"fc.weight": np.ones((4, 8), np.float32), "norm.weight": np.ones(4, np.float32)}, directory / WEIGHTS_FILE)
        samples.fill(directory, version, has_weights=True)

    store.publish(fill)
    return store


def test_spoiled_drafts_leave_the_good_one_alone(store: DraftStore) -> None:
    before = file_sha256(store.directory(0) / WEIGHTS_FILE)
    made = spoiled.make_all(store.root, good=0)
    assert sorted(made.values()) == list(range(1000, 1000 + len(spoiled.KINDS)))
    assert store.verify(0).version == 0
    assert file_sha256(store.directory(0) / WEIGHTS_FILE) == before


def test_some_spoiled_drafts_pass_the_checksums_and_are_wrong_inside(store: DraftStore) -> None:
    made = spoiled.make_all(store.root, good=0)
    for name in ("wrong shape", "NaN", "truncated", "missing tensor", "wrong target"):
        verify_artifact(store.directory(made[name]), DraftManifest)
    assert load_file(store.directory(made["wrong shape"]) / WEIGHTS_FILE)["fc.weight"].shape == (8, 4)
    assert np.isnan(load_file(store.directory(made["NaN"]) / WEIGHTS_FILE)["fc.weight"]).sum() == 1
    assert "fc.weight" not in load_file(store.directory(made["missing tensor"]) / WEIGHTS_FILE)
    with pytest.raises(SafetensorError), safe_open(store.directory(made["truncated"]) / WEIGHTS_FILE, "numpy"):
        pass
    assert store.manifest(made["wrong target"]).spec.target_revision == "0" * 16


@pytest.mark.parametrize("name", ["checksum off", "path in the manifest", "renamed directory", "unfinished"])
def test_others_are_refused_by_the_artifact_check(store: DraftStore, name: str) -> None:
    made = spoiled.make_all(store.root, good=0)
    with pytest.raises(ArtifactError):
        store.verify(made[name])


_ENDLESS = """
import asyncio, sys, types
from pathlib import Path
from loadtest.bars import command
from loadtest.bars.registry import Bar
from loadtest.processes import running_process
from wire.ports import free_ports

async def endless(bench):
    port = free_ports(1)[0]
    server = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port)]
    async with running_process(server, ready_url=f"http://127.0.0.1:{port}/") as process:
        Path(sys.argv[1]).write_text(str(process.pid))
        await asyncio.Event().wait()

sys.modules["loadtest.bars.probe"] = types.SimpleNamespace(endless=endless)
command.measure("probe:endless", None)
"""


@pytest.mark.rig
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_measurement_that_is_ended_stops_what_it_started(tmp_path: Path, number: signal.Signals) -> None:
    noted = tmp_path / "pid"
    bench = subprocess.Popen(
        [sys.executable, "-c", _ENDLESS, str(noted)],
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),  # as the shell does for a background job
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: noted.exists() and noted.read_text())
        bench.send_signal(number)
        bench.wait(60)
        with pytest.raises(ProcessLookupError):
            os.kill(int(noted.read_text()), 0)
    finally:
        bench.kill()
