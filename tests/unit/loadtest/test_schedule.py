"""The schedule is fixed before the run, and the same whenever it is made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadtest.scenario import Scenario, Trace
from loadtest.schedule import LanePlan, Planned, domain_of, plan, sources
from loadtest.traces import TraceRow, read_trace, words_of
from loadtest.traffic import TrafficError
from wire.errors import ConfigError

POISSON = {"kind": "poisson", "rate_per_s": 30}


def phase(name: str = "p", arrivals: Any = None, **more: Any) -> dict[str, Any]:
    return {"name": name, "duration_s": 10, "arrivals": arrivals or POISSON, "traffic": {"a": 1, "b": 1}, **more}


def scenario(*lanes: dict[str, Any], **more: Any) -> Scenario:
    named = [{"name": f"lane-{index}", **lane} for index, lane in enumerate(lanes)]
    return Scenario.build({"name": "s", "what": "w", "lane": named, **more}, source="test")


def planned(*lanes: dict[str, Any], seed: int = 0) -> list[list[Planned]]:
    return [list(one.planned()) for one in plan(scenario(*lanes, seed=seed), lambda _name, _split: 7)]


def test_the_same_scenario_gives_the_same_list_and_another_seed_another() -> None:
    lane = {"phase": [phase()]}
    assert planned(lane) == planned(lane)
    assert planned(lane, seed=1) != planned(lane)


def test_a_lane_sends_the_same_whatever_runs_beside_it() -> None:
    alone, beside = planned({"phase": [phase()]}), planned({"phase": [phase()]}, {"phase": [phase()]})
    assert beside[0] == alone[0]
    assert [one.at_s for one in beside[1]] != [one.at_s for one in beside[0]]


def test_phases_follow_one_another_and_go_on_counting_and_dealing() -> None:
    (found,) = planned({"phase": [phase("first", traffic={"a": 1}), phase("second", traffic={"a": 1})]})
    assert [one.index for one in found] == list(range(len(found)))
    starts = {name: min(one.at_s for one in found if one.phase.name == name) for name in ("first", "second")}
    assert starts["first"] < 1
    assert 10 <= starts["second"] < 11
    assert all(sorted(one.number for one in found[start : start + 7]) == list(range(7)) for start in range(0, 140, 7))


def test_a_closed_phase_has_an_order_but_no_times() -> None:
    def closed_plan() -> LanePlan:
        (found,) = plan(scenario({"phase": [phase(), phase("c", {"kind": "closed", "concurrency": 2})]}), lambda *_: 7)
        return found

    first, second = closed_plan(), closed_plan()
    found = first.phase_at(12.0)
    assert found is not None
    assert (found[0].name, found[1]) == ("c", 10.0)
    assert first.phase_at(20.0) is None
    drawn = [first.next_closed(*found, at_s) for at_s in (12.0, 12.5, 13.0)]
    again = [second.next_closed(*found, at_s) for at_s in (15.0, 16.0, 17.0)]
    assert [(one.source, one.number) for one in drawn] == [(one.source, one.number) for one in again]
    assert [one.index for one in drawn] == [len(first), len(first) + 1, len(first) + 2]


def write_trace(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(row) if isinstance(row, dict) else row}\n" for row in rows))
    return path


def row(
    timestamp: float, input_length: int = 1024, output_length: int = 40, hash_ids: tuple[int, ...] = (1, 2)
) -> dict[str, Any]:
    return {"timestamp": timestamp, "input_length": input_length, "output_length": output_length, "hash_ids": hash_ids}


def test_a_trace_keeps_its_times_and_lengths_scaled(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.jsonl", [row(4000), "{broken", row(1000, output_length=10), row(90_000)])
    arrivals = {"kind": "trace", "path": path, "time_scale": 0.5, "length_scale": 0.1}
    (found,) = planned({"phase": [phase("p"), phase("t", arrivals)]})
    traced = [one for one in found if one.row is not None]
    assert [one.at_s for one in traced] == [10.5, 12.0]
    assert [one.row.max_tokens(0.1) for one in traced if one.row] == [1, 4]


def test_broken_lines_of_a_trace_are_counted_and_what_comes_after_the_run_is_not_kept(tmp_path: Path) -> None:
    deep = '{"timestamp": 1, "more": ' + "[" * 100_000
    no_prompt, absurd, early = row(10, input_length=0), row(10, input_length=10**12), row(-1)
    lines = [row(4000), "{broken", row(1000), "", "\xff", deep, no_prompt, absurd, early, row(3000), row(3001)]
    path = write_trace(tmp_path / "t.jsonl", lines)
    assert [one.timestamp for one in read_trace(path).rows] == [1000, 3000, 3001, 4000]
    found = read_trace(path, before_ms=3001)
    assert ([one.timestamp for one in found.rows], found.num_broken) == ([1000, 3000], 7)
    arrivals = {"kind": "trace", "path": path, "time_scale": 0.001}
    (one,) = plan(scenario({"phase": [phase(arrivals=arrivals), phase(arrivals=arrivals)]}), lambda *_: 7)
    assert (len(one), one.num_broken_rows) == (8, 14)


def test_a_trace_that_holds_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TrafficError, match=r"empty\.jsonl holds no line"):
        read_trace(write_trace(tmp_path / "empty.jsonl", ["{}", "[]"]))
    with pytest.raises(TrafficError, match="cannot read"):
        read_trace(tmp_path / "absent.jsonl")


def test_equal_blocks_of_a_trace_are_equal_text_and_others_are_not() -> None:
    vocabulary = [str(number) for number in range(1000)]

    def text(*hash_ids: int, length: int = 1024) -> list[str]:
        return words_of(TraceRow(0, length, 1, hash_ids), vocabulary, length_scale=0.5, seed=0).split()

    first, second = text(1, 2), text(1, 3)
    block = int(512 * 0.5 * 0.75)
    assert len(first) == len(second) == 2 * block
    assert first[:block] == second[:block]
    assert first[block:] != second[block:]
    assert len(text(1, 2, length=600)) == round(300 * 0.75)
    assert len(text(length=600)) == round(300 * 0.75)


def test_a_scenario_names_every_source_once_and_by_split() -> None:
    lanes = {"phase": [phase(), phase(split="heldout", end_traffic={"c": 1})]}
    assert sources(scenario(lanes)) == [("a", "train"), ("b", "train"), ("a", "heldout"), ("b", "heldout"), ("c", "heldout")]


@pytest.mark.parametrize(
    ("source", "label"), [("human_eval", "human_eval"), ("/data/my chats.jsonl", "my_chats"), ("x.jsonl", "x"), ("é/", "_")]
)
def test_a_sources_label_is_one_a_header_can_carry(source: str, label: str) -> None:
    assert domain_of(source) == label


def test_the_scenario_in_the_documentation_is_one(tmp_path: Path) -> None:
    text = (Path(__file__).resolve().parents[3] / "loadtest" / "README.md").read_text()
    path = tmp_path / "s.toml"
    path.write_text(text.split("```toml\n")[1].split("```")[0])
    assert Scenario.read(path, []).name == "users"


def test_paths_are_meant_from_where_the_scenario_lies(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    trace = 'arrivals = {kind = "trace", path = "t.jsonl"}\ntraffic = {"chats.jsonl" = 1, name = 1, "/away/b.jsonl" = 2}'
    path.write_text(f'name = "s"\nwhat = "w"\n[[lane]]\nname = "l"\n[[lane.phase]]\nname = "p"\nduration_s = 1\n{trace}')
    (found,) = Scenario.read(path, []).lane[0].phase
    assert isinstance(found.arrivals, Trace)
    assert found.arrivals.path == tmp_path / "t.jsonl"
    assert found.traffic == {str(tmp_path / "chats.jsonl"): 1, "name": 1, "/away/b.jsonl": 2}


def test_the_same_prompts_are_drawn_of_a_file_wherever_it_lies() -> None:
    def numbers(source: str) -> list[int]:
        (found,) = planned({"phase": [phase(traffic={source: 1})]})
        return [one.number for one in found]

    assert numbers("/a/chats.jsonl") == numbers("/b/chats.jsonl") != numbers("/b/others.jsonl")


def test_an_action_on_a_process_names_it() -> None:
    with pytest.raises(ConfigError, match="needs a process"):
        scenario({"phase": [phase()]}, action=[{"at_s": 1, "do": "kill"}])
