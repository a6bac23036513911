"""The shipped scenarios: all there, sound, planned without a network, and each with a small variant."""

from __future__ import annotations

import socket
from functools import cache
from pathlib import Path

import pytest

from loadtest.detectors.domain_shift import shifts
from loadtest.run.output import as_toml
from loadtest.scenario import SHIPPED, Scenario, Trace, locate
from loadtest.schedule import Planned, plan, sources
from loadtest.sources import PACKAGES, load
from wire.errors import ConfigError

NAMES = [
    "burst",
    "domain_shift",
    "domain_shift_gradual",
    "faults",
    "long_prompts",
    "multi_turn",
    "overload",
    "rl_and_users",
    "steady",
    "swap_storm",
]
FILES = sorted(path.stem for path in SHIPPED.glob("*.toml"))
CONTEXT_TOKENS = 2048
"""Of the default configuration."""


def read(name: str) -> Scenario:
    return Scenario.read(locate(Path(name)), [])


@cache
def size_of(name: str, split: str) -> int:
    return len(load(name).part(split))


def planned(one: Scenario) -> list[Planned]:
    return [request for lane_plan in plan(one, size_of) for request in lane_plan.planned()]


def test_a_name_is_a_shipped_scenario_and_a_path_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert locate(Path("steady.small")) == SHIPPED / "steady.small.toml"
    assert locate(Path("steady.toml")) == Path("steady.toml")
    assert locate(Path("mine/steady")) == Path("mine/steady")
    with pytest.raises(ConfigError, match=r"'stead'; there are burst, .*steady, steady\.small"):
        locate(Path("stead"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "steady").write_text("")
    assert locate(Path("steady")) == Path("steady"), "a file that is there is meant"


def test_all_are_there_each_with_a_small_variant() -> None:
    assert sorted([*NAMES, *(f"{name}.small" for name in NAMES)]) == FILES


@pytest.mark.parametrize("name", FILES)
def test_a_scenario_is_planned_without_a_network_the_same_every_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object, **_more: object) -> None:
        raise AssertionError("a scenario is planned without a network")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    one = read(name)
    assert one.name == name
    assert {source for source, _ in sources(one)} <= set(PACKAGES)
    first = planned(one)
    assert len(first) >= 10
    assert first == planned(read(name))


@pytest.mark.parametrize("name", FILES)
def test_a_scenario_survives_being_written_down(name: str, tmp_path: Path) -> None:
    one = read(name)
    (tmp_path / "scenario.toml").write_text(as_toml(one))
    assert Scenario.read(tmp_path / "scenario.toml", []) == one


@pytest.mark.parametrize("name", NAMES)
def test_a_small_variant_goes_through_the_same_in_seconds(name: str) -> None:
    full, small = read(name), read(f"{name}.small")
    assert small.duration_s <= 10
    assert len(planned(small)) < 80
    assert small.duration_s < full.duration_s / 10
    done, small_done = ([(action.do, action.process) for action in one.action] for one in (full, small))
    assert small_done == done
    for lane, small_lane in zip(full.lane, small.lane, strict=True):
        assert small_lane.name == lane.name
        assert small_lane.max_tokens <= lane.max_tokens
        assert (small_lane.turns is None, small_lane.cancel is None) == (lane.turns is None, lane.cancel is None)
        kinds = [(phase.arrivals.kind, set(phase.traffic), phase.end_traffic) for phase in lane.phase]
        small_kinds = [(phase.arrivals.kind, set(phase.traffic), phase.end_traffic) for phase in small_lane.phase]
        assert [kind for kind in small_kinds if kind not in kinds] == []
        assert {str(kind) for kind in kinds} == {str(kind) for kind in small_kinds}


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("domain_shift", [("human_eval", "sharegpt"), ("sharegpt", "reasoning_gym"), ("reasoning_gym", "human_eval")]),
        ("domain_shift_gradual", [("human_eval", "reasoning_gym"), ("reasoning_gym", "human_eval")]),
    ],
)
def test_the_shifts_are_those_that_the_report_looks_for(name: str, wanted: list[tuple[str, str]]) -> None:
    found = shifts(read(name))
    assert [(shift.before, shift.after) for shift in found] == wanted
    is_gradual = name == "domain_shift_gradual"
    assert all((shift.ends_at_s > shift.at_s) == is_gradual for shift in found)
    assert [(shift.before, shift.after) for shift in shifts(read(f"{name}.small"))] == wanted


def test_long_prompts_fit_the_default_context_and_share_their_beginnings() -> None:
    (phase,) = read("long_prompts").lane[0].phase
    assert isinstance(phase.arrivals, Trace)
    rows = [one.row for one in planned(read("long_prompts")) if one.row is not None]
    scale = phase.arrivals.length_scale
    longest = max(row.input_length * scale * 1.25 + row.max_tokens(scale) for row in rows)
    assert 1000 < longest < CONTEXT_TOKENS, "a quarter more tokens than the estimate are allowed for"
    first_blocks = [row.hash_ids[0] for row in rows]
    assert len(set(first_blocks)) < len(first_blocks) / 4


def test_a_storm_ends_with_the_draft_it_began_with() -> None:
    for name in ("swap_storm", "swap_storm.small"):
        one = read(name)
        (storm,) = one.action
        assert storm.every_s is not None
        assert (one.duration_s - storm.at_s) / storm.every_s % 2 == 0
