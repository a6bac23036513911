"""Benchmarks as files, and the work they make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launch.config import SystemConfig
from loadtest.learning import arms
from loadtest.learning.arms import settings_of, why_unavailable
from loadtest.learning.benchmark import SHIPPED, Benchmark, locate, scenario
from loadtest.learning.work import plan_work, sources
from loadtest.sources import PACKAGES
from wire.errors import ConfigError

SHIPPED_FILES = sorted(SHIPPED.glob("*.toml"))


def benchmark(*arm_tables: dict[str, Any], **more: Any) -> Benchmark:
    phases = [
        {"name": "a", "num_requests": 40, "traffic": {"x": 1}, "unseen_every": 4},
        {"name": "mix", "num_requests": 400, "traffic": {"x": 1}, "end_traffic": {"y": 1}},
    ]
    return Benchmark.build({"name": "b", "what": "w", "phase": phases, "arm": list(arm_tables), **more}, source="test")


NONE = {"name": "none", "method": "none"}


@pytest.mark.parametrize("path", SHIPPED_FILES, ids=lambda path: path.stem)
def test_a_shipped_benchmark_asks_for_sources_and_settings_that_exist(path: Path, tmp_path: Path) -> None:
    one = Benchmark.read(path, [])
    assert one.name == path.stem
    assert {source for source, _ in sources(one)} <= set(PACKAGES)
    for arm in one.arm:
        SystemConfig.load([], settings_of(arm, one.settings, tmp_path))


def test_the_shipped_benchmark_holds_every_arm_that_a_bar_needs() -> None:
    names = {arm.name for arm in Benchmark.read(locate(Path("learning")), []).arm}
    assert {"none", "ngram", "suffix", "static", "aurora", "ours", "fresh", "cold"} <= names


def test_requests_are_drawn_from_the_seed_alone() -> None:
    first, again, other = (plan_work(benchmark(NONE, seed=seed), lambda *_: 50) for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_every_so_many_requests_are_kept_from_the_learner() -> None:
    (part, _) = plan_work(benchmark(NONE), lambda *_: 50)
    assert [planned.index for planned in part.requests if planned.phase.split == "heldout"] == list(range(3, 40, 4))


def test_no_prompt_comes_again_before_all_have_come_once() -> None:
    (first, second) = plan_work(benchmark(NONE), lambda *_: 50)
    seen = [planned.number for planned in first.requests if planned.phase.split == "train"]
    seen += [planned.number for planned in second.requests if planned.source == "x"]
    assert len(set(seen[:50])) == 50
    assert [planned.index for planned in first.requests + second.requests] == list(range(440))


def test_a_gradual_mix_goes_from_one_source_to_the_other() -> None:
    (_, mixed) = plan_work(benchmark(NONE), lambda *_: 50)
    shares = [
        sum(planned.source == "y" for planned in mixed.requests[start : start + 100]) / 100 for start in range(0, 400, 100)
    ]
    assert shares == sorted(shares)
    assert shares[0] < 0.3 < 0.7 < shares[3]


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([{**NONE, "phases": ["b"]}], "phases that do not exist: \\['b'\\]"),
        ([NONE, NONE], "two arms have one name"),
        ([{"name": "ours", "method": "draft", "draft": "static"}, {"name": "static", "method": "draft"}], "no arm with a draft before it"),
        ([NONE, {"name": "ours", "method": "draft", "draft": "none"}], "no arm with a draft before it"),
    ],
)  # fmt: skip
def test_a_benchmark_that_makes_no_sense_is_refused(tables: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        benchmark(*tables)


def test_a_name_that_is_no_benchmark_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="there are learning, learning-small, smoke"):
        locate(Path("learn"))


def test_an_arm_starts_from_an_earlier_arms_draft_and_its_own_settings_win(tmp_path: Path) -> None:
    one = benchmark(
        {"name": "fresh", "method": "draft"},
        {"name": "static", "method": "draft", "draft": "fresh", "learns": False, "settings": ["depth.mode=auto"]},
        settings=["depth.mode=fixed"],
    )
    fresh, static = (SystemConfig.load([], settings_of(arm, one.settings, tmp_path)) for arm in one.arm)
    assert fresh.draft.checkpoint is None
    assert fresh.capture.enabled
    assert static.draft.checkpoint == tmp_path / "fresh" / "draft"
    assert not static.capture.enabled
    assert (fresh.depth.mode, static.depth.mode) == ("fixed", "auto")
    assert static.learner.enabled, "without a learner its engine would have another core more"


def test_suffix_decoding_is_not_available_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arms.importlib.util, "find_spec", lambda _name: None)
    one = benchmark(NONE, {"name": "suffix", "method": "suffix"})
    assert [why_unavailable(arm) is None for arm in one.arm] == [True, False]
    assert "arctic-inference" in (why_unavailable(one.arm[1]) or "")


def test_an_arms_scenario_has_its_phases_as_long_as_they_took() -> None:
    one = benchmark({**NONE, "phases": ["mix"]})
    found = scenario(one, one.arm[0], [12.5])
    assert [(phase.name, phase.duration_s, phase.end_traffic) for phase in found.lane[0].phase] == [("mix", 12.5, {"y": 1.0})]
