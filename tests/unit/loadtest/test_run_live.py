"""The line a person sees, the lag it is judged by, and the last words of a run."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from run_rig import phase, scenario

from loadtest.records import ActionRecord, EngineSample, RequestRecord, RunRecord, Swap, SystemSample
from loadtest.run.clock import Clock
from loadtest.run.command import summary
from loadtest.run.live import LiveLine
from loadtest.run.tally import LagHistogram, Tally

SCENARIO = scenario({"phase": [phase({"kind": "poisson", "rate_per_s": 1}, 10.0)]}, cut={"warm_up_s": 2.0, "cool_down_s": 1.0})


def record(intended_at_s: float, lag_s: float = 0.001, **more: Any) -> RequestRecord:
    sent_at_s = intended_at_s + lag_s
    named: dict[str, Any] = {"index": 0, "lane": "l", "phase": "p", "domain": "d", "prompt_id": "x", "outcome": "ok"}
    times = {"intended_at_s": intended_at_s, "sent_at_s": sent_at_s, "ended_at_s": sent_at_s + 1}
    return RequestRecord(**{**named, **times, "chunk_times_s": [sent_at_s + 0.25], "chunk_token_counts": [7], **more})


def sample(steps: float, accepted: float, **more: Any) -> SystemSample:
    named: dict[str, Any] = {"at_s": 0, "active_version": 3, "kv_paths": {}, "prompt_tokens": 0, "completion_tokens": 0}
    counts = {"steps": {"d": {"3": steps}}, "accepted": {"d": {"3": [accepted]}}, "cpu_s": {}, "engines": {}}
    return SystemSample(**{**named, **counts, **more})


def test_the_line_tells_what_became_of_requests_and_of_the_system() -> None:
    tally = Tally(SCENARIO)
    line = LiveLine(SCENARIO, tally, Clock())
    for _ in range(3):
        tally.begin()
    tally.end(record(5.0))
    tally.end(record(5.0, outcome="truncated", chunk_times_s=[], chunk_token_counts=[]))
    text = line.text()
    for part in ("sent 3", "in flight 1", "ok 1", "truncated 1", "TTFT 251 ms", "lag p99 1.1 ms"):
        assert part in text
    assert "draft" not in text
    line.see(sample(10, 5))
    swap = Swap(at_s=1, version=3, previous=2, outcome="committed", trigger="activate")
    line.see(sample(20, 13, swaps=[swap], engines={"engine-0": EngineSample(ready=False, draining=False)}))
    assert line.text().endswith("draft 3 | AL 1.80 | swaps 1 | engine-0 is not ready")


class Stopped(Clock):
    """A clock that shows what it is told to."""

    shown_s = 0.0

    def now_s(self) -> float:
        return self.shown_s


def bar_of(screen: str) -> tuple[str, int]:
    """The last line with the bar that was drawn, and how many of its cells are full."""
    (*_, line) = [line for line in screen.splitlines() if "━" in line]
    full = re.search(r"━+", re.sub(r"\x1b\[[0-9;]*m", "|", line).strip("|"))
    assert full is not None
    return line, len(full[0])


def test_a_terminal_sees_a_bar_that_grows_above_the_line() -> None:
    clock, tally, file = Stopped(), Tally(SCENARIO), io.StringIO()
    line = LiveLine(SCENARIO, tally, clock)
    console = Console(force_terminal=True, file=file, width=100, color_system="standard", legacy_windows=False)
    widths = []
    with line.shown_on(console) as show:
        for clock.shown_s in (2.0, 5.0, 10.0, 99.0):
            tally.begin()
            file.truncate(0)
            show()
            first, full = bar_of(file.getvalue())
            assert first.index(SCENARIO.name) < first.index("━")
            assert f"sent {tally.num_sent}" in file.getvalue()
            widths.append(full)
    assert widths == [8, 20, 40, 40], "of forty cells, and full at the end however long the last answers take"


def test_without_a_terminal_it_is_one_plain_line_each_time() -> None:
    clock, file = Stopped(), io.StringIO()
    line = LiveLine(SCENARIO, Tally(SCENARIO), clock)
    with line.shown_on(Console(file=file)) as show:
        for clock.shown_s in (10.0, 20.0):
            show()
    first, second = file.getvalue().splitlines()
    assert (first.split()[:3], second.split()[:3]) == (["10", "s", "sent"], ["20", "s", "sent"])
    assert "\x1b" not in file.getvalue()


def test_lags_are_counted_between_warm_up_and_cool_down_and_in_open_loops_only() -> None:
    tally = Tally(SCENARIO)
    for one in (record(1.9, 1.0), record(9.0, 1.0), record(5.0, 1.0, is_open_loop=False), record(2.0, 0.00423)):
        tally.begin()
        tally.end(one)
    assert tally.lags.summary_ms() == {"p50": 4.25, "p99": 4.25, "max": 4.23}


def test_a_lag_beyond_the_histogram_is_still_told_by_its_maximum() -> None:
    lags = LagHistogram()
    assert lags.summary_ms() == {"p50": None, "p99": None, "max": None}
    for _ in range(99):
        lags.add(0.0001)
    lags.add(12.5)
    assert lags.quantile_ms(0.99) == pytest.approx(0.15)
    assert lags.quantile_ms(1.0) == pytest.approx(2000, abs=1)
    assert lags.summary_ms()["max"] == 12500


def test_the_last_words_say_what_was_wrong() -> None:
    failed = ActionRecord(at_s=1, ended_at_s=2, do="drain", process="engine-9", problem="there is no such engine")
    run = RunRecord(
        **{"name": "n", "url": "u", "model": "m", "seed": 0, "started_at_s": 0, "commit": None, "machine": {}, "versions": {}},
        duration_s=10.0,
        is_valid=False,
        invalid_reasons=["it lagged"],
        num_requests={"failed": 1, "ok": 5},
        dispatch_lag_ms={"p50": 1.0, "p99": 30.0, "max": None},
        actions=[failed],
    )
    text = summary(run, SCENARIO, Path("runs/n"))
    for part in ("6 requests in 10.0 s: 5 ok, 1 failed", "p99 30.00 ms", "INVALID: it lagged", "runs/n"):
        assert part in text
    assert "drain engine-9 at 1.0 s failed: there is no such engine" in text


def test_a_scenarios_name_is_no_markup() -> None:
    odd = scenario({"phase": [phase({"kind": "poisson", "rate_per_s": 1}, 10.0)]}, name="a [/b] name")
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with LiveLine(odd, Tally(odd), Clock()).shown_on(console) as show:
        show()
    assert isinstance(console.file, io.StringIO)
    assert "a [/b] name" in console.file.getvalue()
