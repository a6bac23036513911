"""A whole learning benchmark in front of servers that answer at once: what is run, what is left, what is said of it."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from run_rig import Server, largest_file, lines, serving

from loadtest.bars import learning_stream
from loadtest.bars.registry import Bench, Measured
from loadtest.learning import circumstances
from loadtest.learning.arms import RunningArm
from loadtest.learning.benchmark import SHIPPED, Arm, Benchmark
from loadtest.learning.command import run_and_report
from loadtest.learning.verdicts import Results, measured
from loadtest.records import RequestRecord, RunRecord
from loadtest.report.analysis import analyse
from loadtest.run.conduct import Provenance
from loadtest.system import SystemUnderTestError
from wire.errors import ConfigError

SMOKE = SHIPPED / "smoke.toml"


def answering(al: float, step_s: float) -> Callable[[dict[str, Any], Callable[[Any], Awaitable[None]]], Awaitable[None]]:
    """Eight verify steps of this mean AL, this long each."""

    async def script(_body: dict[str, Any], send: Callable[[Any], Awaitable[None]]) -> None:
        accepted = [int(number < 8 * (al - 1)) for number in range(8)]
        for _ in accepted:
            await asyncio.sleep(step_s)
            await send({"choices": [{"delta": {"content": "yes "}, "finish_reason": None}]})
        usage: dict[str, Any] = {"prompt_tokens": 5, "completion_tokens": 8 + sum(accepted), "total_tokens": 13 + sum(accepted)}
        metrics = {"per_step_accepted": accepted, "per_step_drafted": [1] * 8, "num_spec_tokens": 1}
        await send({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        await send({"choices": [], "usage": usage, "metrics": {"speculative_decoding": metrics}})
        await send("[DONE]")

    return script


async def refusing(_body: dict[str, Any], _send: Callable[[Any], Awaitable[None]]) -> None:
    """Nothing is sent: a 503."""


@dataclass
class Machine:
    """Starts servers in place of systems."""

    started: list[tuple[str, list[str]]] = field(default_factory=list)
    asked: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    fails: set[str] = field(default_factory=set)
    """Arms that do not start."""
    is_broken: bool = False
    """Requests are refused."""
    largest_file_bytes: int | None = None
    """As if the disk were full behind that."""

    @asynccontextmanager
    async def start(self, arm: Arm, settings: Sequence[str]) -> AsyncIterator[RunningArm]:
        self.started.append((arm.name, list(settings)))
        if arm.name in self.fails:
            raise SystemUnderTestError("it did not start")
        server = Server(
            refusing if self.is_broken else answering(1.0 if arm.method == "none" else 1.5, 0.001),
            asked=self.asked.setdefault(arm.name, []),
        )
        async with serving(server) as url:
            with nullcontext() if self.largest_file_bytes is None else largest_file(self.largest_file_bytes):
                yield _Kept(url)


class _Kept(RunningArm):
    async def keep_draft(self, directory: Path) -> None:
        directory.mkdir()
        (directory / "model.safetensors").write_text(self.url)


def run(
    directory: Path,
    machine: Machine,
    *,
    arms: Sequence[str] = (),
    benchmark: Benchmark | None = None,
    provenance: Provenance = Provenance(None, {}, {}),
    up_arguments: Sequence[str] = (),
) -> tuple[Results, dict[str, str], list[str]]:
    said: list[str] = []
    one = benchmark or Benchmark.read(SMOKE, [])
    whole = run_and_report(one, arms, directory, machine.start, up_arguments, provenance, said.append)
    return *asyncio.run(whole), said


@pytest.fixture(autouse=True)
def _a_model_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def model(*_: object) -> str:
        return "m"

    monkeypatch.setattr("loadtest.run.target._first_model", model)


def test_every_arm_does_the_same_work(tmp_path: Path) -> None:
    machine = Machine()
    results, failures, said = run(tmp_path, machine)
    assert not failures
    assert [name for name, _ in machine.started] == ["none", "fresh", "static", "ours"]
    prompts = {
        name: [(one.index, one.prompt_id) for one in lines(tmp_path / name / "requests.jsonl", RequestRecord)]
        for name in ("none", "static", "ours")
    }
    assert prompts["none"] == prompts["static"] == prompts["ours"]
    found = measured(results)
    assert found["worst_minute_none"].value is not None
    assert found["shift_speed_up"].value == pytest.approx(1.0, abs=0.5)
    assert any("P4.shift_speed_up" in line for line in said)
    assert json.loads((tmp_path / "learning.json").read_text())["arms"].keys() == {"none", "fresh", "static", "ours"}
    page = (tmp_path / "learning.html").read_text()
    assert "<svg" in page
    rows = {name: page.split(f"<td>{name}</td>")[1].split("</tr>")[0] for name in ("none", "fresh", "ours")}
    assert "1.000 (1.000 to 1.000)" in rows["none"]
    assert "(" not in rows["fresh"], "it shares no request with none"
    assert "(" in rows["ours"]


def test_an_arms_directory_is_that_of_any_load_test(tmp_path: Path) -> None:
    run(tmp_path, Machine())
    found = analyse(tmp_path / "ours")
    assert not found.why_invalid
    assert found.acceptance_source == "requests"
    assert found.everything.acceptance_length.value == pytest.approx(1.5)
    shifts = [(recovery.shift.before, recovery.shift.after) for recovery in found.recoveries]
    assert shifts == [("human_eval", "tool_calls"), ("tool_calls", "human_eval")]
    requests = lines(tmp_path / "ours" / "requests.jsonl", RequestRecord)
    for recovery, before, after in zip(found.recoveries, ("code", "tools"), ("tools", "code again"), strict=True):
        last_end_s = max(one.ended_at_s for one in requests if one.phase == before)
        first_sent_s = min(one.sent_at_s for one in requests if one.phase == after)
        assert last_end_s <= recovery.shift.at_s <= first_sent_s


def test_unseen_prompts_are_kept_from_the_learner(tmp_path: Path) -> None:
    machine = Machine()
    run(tmp_path, machine, arms=["fresh"])
    captured = [body["headers"].get("X-Paceline-Capture") for body in machine.asked["fresh"]]
    stream = captured[-8:]
    assert stream == [None, None, None, "off", None, None, None, "off"]
    assert set(captured[:-8]) == {"off"}, "warming up teaches nothing"


def test_what_is_done_is_not_done_again_and_what_broke_off_is(tmp_path: Path) -> None:
    run(tmp_path, Machine(), arms=["none", "fresh"])
    (tmp_path / "none" / "arm.json").unlink()
    machine = Machine()
    results, _, said = run(tmp_path, machine, arms=["none", "fresh", "static"])
    assert [name for name, _ in machine.started] == ["none", "static"]
    assert "fresh: done before" in said
    assert list(results.arms) == ["none", "fresh", "static"]


def test_an_arm_starts_from_where_the_other_ended(tmp_path: Path) -> None:
    machine = Machine()
    run(tmp_path, machine)
    settings = dict(machine.started)
    assert f"draft.checkpoint={tmp_path / 'fresh' / 'draft'}" in settings["ours"]
    assert not any(word.startswith("draft.checkpoint") for word in settings["fresh"])


def test_arms_from_another_draft_are_not_mixed_in(tmp_path: Path) -> None:
    run(tmp_path, Machine())
    shutil.rmtree(tmp_path / "fresh")
    results, failures, said = run(tmp_path, Machine())
    assert list(results.arms) == ["none", "fresh"]
    assert set(failures) == {"static", "ours"}
    assert "ours is not available: what it left is of other work or settings, or from another draft" in said


def test_an_arm_without_the_draft_it_starts_from_fails_and_says_so(tmp_path: Path) -> None:
    _, failures, _ = run(tmp_path, Machine(), arms=["none", "static"])
    assert failures == {"static": "static starts from the draft of fresh, which has not run; run it too (--arms)"}


def test_an_arm_that_fails_leaves_the_others(tmp_path: Path) -> None:
    results, failures, _ = run(tmp_path, Machine(fails={"none"}))
    assert failures == {"none": "it did not start"}
    assert list(results.arms) == ["fresh", "static", "ours"]
    assert measured(results)["worst_minute_none"] == Measured(None, {"reason": "arms that did not run: none"})


def test_an_arm_whose_requests_failed_is_marked(tmp_path: Path) -> None:
    _, failures, said = run(tmp_path, Machine(is_broken=True), arms=["fresh"])
    assert not failures
    assert "fresh IS NOT VALID: 8 of 8 requests failed" in said


def test_an_arm_of_which_not_everything_could_be_kept_is_not_done(tmp_path: Path) -> None:
    _, failures, _ = run(tmp_path, Machine(largest_file_bytes=2000), arms=["none"])
    assert "what came since is lost" in failures["none"]
    results, failures, said = run(tmp_path, Machine(), arms=["none"])
    assert not failures
    assert list(results.arms) == ["none"], "it is run again where there is room"
    assert "none: done before" not in said


def test_an_arm_does_not_start_from_the_draft_of_other_work(tmp_path: Path) -> None:
    run(tmp_path, Machine(), arms=["fresh"])
    machine = Machine()
    _, failures, _ = run(tmp_path, machine, arms=["ours"], benchmark=Benchmark.read(SMOKE, ["seed=1"]))
    assert "which ran with other work or settings" in failures["ours"]
    assert not machine.started


def test_an_arm_of_other_work_is_not_mixed_in(tmp_path: Path) -> None:
    run(tmp_path, Machine(), arms=["none"])
    changed = Benchmark.read(SMOKE, ["seed=1"])
    results, failures, _ = run(tmp_path, Machine(), arms=["none"], benchmark=changed)
    assert "other work or settings" in failures["none"]
    assert not results.arms


def test_an_arm_of_another_configuration_file_by_the_same_name_is_not_mixed_in(tmp_path: Path) -> None:
    config = tmp_path / "cpu.toml"
    config.write_text("[depth]\n")
    words = ("--config", str(config))
    for text, is_refused in (("[depth]\n", False), ("[depth]\n", False), ("[depth]\nmode = 'fixed'\n", True)):
        config.write_text(text)
        results, failures, _ = run(tmp_path / "runs", Machine(), arms=["none"], up_arguments=words)
        assert ("none" in failures, "none" in results.arms) == (is_refused, not is_refused)


OLD, NEW = Provenance("c1", {"torch": "2"}, {}), Provenance("c2", {"torch": "2"}, {})


def test_an_arm_that_another_commit_measured_counts_for_no_bar(tmp_path: Path) -> None:
    run(tmp_path, Machine(), provenance=OLD)
    shutil.rmtree(tmp_path / "none")
    machine = Machine()
    results, failures, _ = run(tmp_path, machine, provenance=NEW)
    assert (failures, [name for name, _ in machine.started]) == ({}, ["none"])
    found = measured(results)["worst_minute_none"]
    how = "measured otherwise (commit c1, now c2); to measure it afresh: rm -r {}, then this command again"
    told = "; ".join(f"{name} was {how.format(tmp_path / name)}" for name in ("ours", "fresh"))
    assert found == Measured(None, {"reason": told}), "the draft that ours starts from is of other code as well"
    for name in ("fresh", "static", "ours"):
        shutil.rmtree(tmp_path / name)
    results, _, _ = run(tmp_path, Machine(), provenance=NEW)
    assert measured(results)["worst_minute_none"].value is not None


def test_an_arm_counts_for_no_bar_under_other_versions_or_where_nothing_tells_what_measured_it(tmp_path: Path) -> None:
    run(tmp_path, Machine(), arms=["none", "fresh"], provenance=OLD)
    results, _, _ = run(tmp_path, Machine(), arms=["none"], provenance=replace(OLD, versions={"torch": "3"}))
    assert "version of torch 2, now 3" in results.stale["none"]
    results, _, _ = run(tmp_path, Machine(), arms=["none"], provenance=replace(OLD, versions={}))
    assert "version of torch 2, now none" in results.stale["none"]
    results, _, _ = run(tmp_path, Machine(), arms=["none"], provenance=OLD)
    assert not results.stale
    (tmp_path / "none" / "run.json").unlink()
    results, _, _ = run(tmp_path, Machine(), arms=["none"], provenance=OLD)
    assert results.stale.keys() == {"none"}
    assert "commit unknown, now c1" in results.stale["none"]


def test_an_arm_counts_for_no_bar_on_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, Machine(), arms=["none"], provenance=OLD)
    here = circumstances.machine()
    monkeypatch.setattr(circumstances, "machine", lambda: here | {"processor": "a faster one"})
    results, _, _ = run(tmp_path, Machine(), arms=["none"], provenance=OLD)
    assert f"processor {here['processor']}, now a faster one" in results.stale["none"]


def test_the_bars_record_in_every_arm_what_measured_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    monkeypatch.setattr(learning_stream, "BENCHMARK", "smoke")
    monkeypatch.setattr(learning_stream, "DIRECTORY", tmp_path)
    monkeypatch.setattr(learning_stream, "start_with", lambda _words: machine.start)
    found = asyncio.run(learning_stream.measured(Bench((), NEW)))
    assert found["worst_minute_none"].value is not None
    for name in ("none", "fresh", "static", "ours"):
        record = msgspec.json.decode((tmp_path / name / "run.json").read_bytes(), type=RunRecord)
        assert (record.commit, record.versions, record.model) == ("c2", {"torch": "2"}, "m")
        assert record.machine["num_cores"] > 0


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "thesis.tex").write_text("precious")
    _, failures, _ = run(tmp_path, Machine(), arms=["none"])
    assert "holds something that is no arm" in failures["none"]
    assert (tmp_path / "none" / "thesis.tex").read_text() == "precious"
    (tmp_path / "none" / "scenario.toml").write_text('name = "none"')
    _, failures, _ = run(tmp_path, Machine(), arms=["none"])
    assert "holds something that is no arm" in failures["none"], "somebody's load test of that name"
    (tmp_path / "none" / "scenario.toml").write_text('name = "smoke, none"')
    _, failures, _ = run(tmp_path, Machine(), arms=["none"])
    assert not failures, "an arm that was interrupted is begun anew"


def test_an_unknown_arm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no arm \['theirs'\]; there are none, fresh"):
        run(tmp_path, Machine(), arms=["theirs"])


def test_what_is_not_available_is_said_and_asked_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadtest.learning.command.why_unavailable", lambda _arm: "no package")
    machine = Machine()
    _, _, said = run(tmp_path, machine, arms=["none"])
    assert not machine.started
    assert "none is not available: no package" in said
    assert msgspec.json.decode((tmp_path / "none" / "arm.json").read_bytes())["unavailable"] == "no package"
    monkeypatch.setattr("loadtest.learning.command.why_unavailable", lambda _arm: None)
    results, _, _ = run(tmp_path, machine, arms=["none"])
    assert list(results.arms) == ["none"]
