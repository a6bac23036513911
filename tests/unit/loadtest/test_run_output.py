"""What a run writes: a scenario that can be run again, and never over something else."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs
from run_rig import largest_file
from written_run import ENDED, request, write_run

from loadtest.measures.run_directory import RunDirectory
from loadtest.run.output import Output, OutputError
from loadtest.scenario import Scenario

EVERYTHING = """
name = "everything"
what = 'With "quotes", a back\\slash and ünïcode 🙂.'
seed = 7
slo = {ttft_ms = 100}
cut = {warm_up_s = 1}
action = [{at_s = 1, do = "swap", every_s = 2}, {at_s = 2, do = "kill", process = "engine-0"}]
[[lane]]
name = "users"
headers = {X-Paceline-Tenant = "t"}
options = {stop = ["a", "b"], stream_options = {include_usage = true}, nested = [[1, {x = 1}], []]}
turns = {number = 2, mean_think_time_s = 0.5}
cancel = {share = 0.1, mean_after_s = 1}
[[lane.phase]]
name = "a"
duration_s = 5
traffic = {"/data/odd name.jsonl" = 1, human_eval = 2.5}
arrivals = {kind = "trace", path = "trace.jsonl", time_scale = 1e-05}
[[lane.phase]]
name = "b"
duration_s = 5
traffic = {a = 1}
end_traffic = {b = 1}
arrivals = {kind = "closed", concurrency = 3}
[[lane]]
name = "others"
[[lane.phase]]
name = "a"
duration_s = 5
traffic = {a = 1}
arrivals = {rate_per_s = 2, burstiness = 0.5, kind = "poisson"}
"""


def test_the_scenario_that_is_written_reads_as_the_one_that_ran(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text(EVERYTHING)
    scenario = Scenario.read(path, ["seed=8"])
    Output(tmp_path / "run", scenario).close()
    assert Scenario.read(tmp_path / "run" / "scenario.toml", []) == scenario


def test_a_directory_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text(EVERYTHING)
    with pytest.raises(OutputError, match="not empty"):
        Output(tmp_path, Scenario.read(path, []))
    with pytest.raises(OutputError, match="cannot write"):
        Output(path / "under-a-file", Scenario.read(path, []))


def test_a_full_disk_is_told_and_what_was_written_stays(tmp_path: Path) -> None:
    path = write_run(tmp_path / "other", []) / "scenario.toml"
    output = Output(tmp_path / "run", Scenario.read(path, []))
    output.write_run(ENDED)
    with largest_file(20_000):
        for index in range(100):
            output.add_request(request(index, at_s=float(index), text="x" * 400))
        output.flush()
        assert output.problem is not None
        assert "File too large" in output.problem
        output.add_request(request(100, at_s=100.0))
        output.flush()
        with pytest.raises(OutputError, match="File too large"):
            output.write_run(structs.replace(ENDED, model="m" * 30_000))
        output.close()
    run = RunDirectory(tmp_path / "run")
    assert run.record == ENDED
    assert [one.index for one in run.requests()] == list(range(len(list(run.requests()))))
    assert run.num_unreadable["requests.jsonl"] <= 1
    assert sorted(one.name for one in run.path.iterdir()) == ["requests.jsonl", "run.json", "scenario.toml", "timeline.jsonl"]


def test_every_character_of_a_name_survives_being_written(tmp_path: Path) -> None:
    path = write_run(tmp_path / "other", []) / "scenario.toml"
    odd = Scenario.read(path, ["what=" + '"\\u0001\\u007f\\u2028[/]#"'])
    Output(tmp_path / "run", odd).close()
    assert Scenario.read(tmp_path / "run" / "scenario.toml", []) == odd
