"""Scenario files and overrides that cannot be meant: each is refused before anything is sent, with a message that names the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.scenario import Scenario
from loadtest.schedule import plan
from loadtest.traffic import TrafficError
from wire.errors import ConfigError

GOOD = """
name = "s"
what = "w"
[[lane]]
name = "l"
max_tokens = 8
[[lane.phase]]
name = "p"
duration_s = 2
arrivals = {kind = "poisson", rate_per_s = 5}
traffic = {a = 1}
"""


def read(tmp_path: Path, old: str = "", new: str = "") -> Scenario:
    path = tmp_path / "s.toml"
    path.write_text(GOOD.replace(old, new, 1) if old else GOOD)
    return Scenario.read(path, [])


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("rate_per_s = 5", "rate_per_s = -5", "rate_per_s"),
        ("rate_per_s = 5", "rate_per_s = inf", "rate_per_s"),
        ("rate_per_s = 5", "rate_per_s = nan", "rate_per_s"),
        ("rate_per_s = 5", "rate_per_s = 1e12", "requests would be sent"),
        ("rate_per_s = 5", "rate_per_s = 5, end_rate_per_s = 1e12", "requests would be sent"),
        ("rate_per_s = 5", "rate_per_s = 5, burstiness = 1e-12", "burstiness"),
        ("rate_per_s = 5", "rate_per_s = 'five'", "rate_per_s"),
        ("rate_per_s = 5", "rate = 5", r"did you mean .*rate_per_s|unknown key, see loadtest/scenario.py"),
        ('{kind = "poisson", rate_per_s = 5}', '{kind = "closed", concurrency = 1000000000}', "concurrency"),
        ("duration_s = 2", "duration_s = 0", "duration_s"),
        ("duration_s = 2", "duration_s = inf", "duration_s"),
        ("duration_s = 2", "duration_s = 1e9", "duration_s"),
        ("traffic = {a = 1}", "traffic = {}", "traffic"),
        ("traffic = {a = 1}", "traffic = {a = 1}\nend_traffic = {}", "end_traffic"),
        ("traffic = {a = 1}", "traffic = {a = inf}", "traffic"),
        ("traffic = {a = 1}", "traffic = 'a'", "traffic"),
        ("max_tokens = 8", "max_tokens = 99999999999999999999", "max_tokens"),
        ("max_tokens = 8", "max_tokens = 8\noptions = {top_p = nan}", "options"),
        ("max_tokens = 8", "max_tokens = 8\noptions = {since = 2026-01-01}", "options"),
        ("max_tokens = 8", 'max_tokens = 8\nheaders = {"X-A" = "a\\r\\nX-B: b"}', "headers"),
        ("max_tokens = 8", 'max_tokens = 8\nheaders = {"X A" = "a"}', "headers"),
        ("max_tokens = 8", "max_token = 8", "loadtest/scenario.py"),
        ("max_tokens = 8", "max_tokens = " + "8" * 5000, "not valid TOML"),
        ("max_tokens = 8", "max_tokens = " + "[" * 5000, "not valid TOML"),
        ("[[lane]]", "[lane]", "lane"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(old: str, new: str, said: str, tmp_path: Path) -> None:
    assert read(tmp_path).lane[0].max_tokens == 8
    with pytest.raises(ConfigError, match=said):
        read(tmp_path, old, new)


def test_a_trace_whose_scale_makes_endless_prompts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"timestamp": 0, "input_length": 1000, "output_length": 5}\n')
    arrivals = '{kind = "trace", path = "t.jsonl", length_scale = %s}'
    one = read(tmp_path, '{kind = "poisson", rate_per_s = 5}', arrivals % "1000.0")
    assert len(plan(one, lambda *_: 1)[0]) == 1
    with pytest.raises(TrafficError, match="length_scale = 1e\\+09"):
        plan(read(tmp_path, '{kind = "poisson", rate_per_s = 5}', arrivals % "1e9"), lambda *_: 1)
