"""The transaction that puts another target under an engine, over a core and workers that misbehave on request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from server.engine.target_change import TargetChange, TargetRefused
from wire.errors import EngineError
from wire.target_control import TargetCommitReport, TargetCommitRequest


class FakeCore:
    """A core with two workers. Whoever computes while it is paused, or with a label that is not the weights', is found out."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.versions = [0, 0]
        self.label = "default"
        self.is_paused = False
        self.refusing: set[int] = set()
        """Workers that refuse the next commit of a version above their own."""
        self.keeping: set[int] = set()
        """Workers that refuse to go back."""
        self.num_failing_pauses = 0
        self.hangs_on_pause = False
        self.fails_to_label: set[str] = set()
        self.apply_s = 0.0
        self.files = ["sum", "sum"]
        self.raising: set[str] = set()
        """Methods that raise on a worker, after they have done what they do."""
        self.has_ended = False

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("keep", True)
        self.calls.append("pause")
        self.is_paused = True
        if self.hangs_on_pause:
            await asyncio.Event().wait()
        if self.num_failing_pauses:
            self.num_failing_pauses -= 1
            raise Exception("Failed to reset KV cache")  # as vLLM's client raises what a utility raised

    async def resume_generation(self) -> None:
        self.calls.append("resume")
        self.is_paused = False

    async def update_weight_version(self, new_version: str) -> None:
        self.calls.append(f"label {new_version}")
        if new_version in self.fails_to_label:
            raise Exception("the utility failed")
        self.label = new_version

    async def ask(self, method: str, *args: int) -> list[dict[str, Any]]:
        if method == "paceline_give_up":
            self.has_ended = True
            raise EngineError("the engine core died before it answered")
        assert self.is_paused
        self.calls.append(" ".join([method.removeprefix("paceline_"), *map(str, args)]))
        if method == "paceline_target_digest":
            assert len(set(self.versions)) == 1, "all ranks compute together"
            self._raise(method)
            return [{"digest": f"of {version}"} for version in self.versions]
        await asyncio.sleep(self.apply_s)
        answers = [self._commit(worker, *args) for worker in range(2)]
        self._raise(method)
        return answers

    def _raise(self, method: str) -> None:
        if method in self.raising:
            raise Exception("Call to collective_rpc method failed")  # as vLLM's client raises what a worker raised

    def _commit(self, worker: int, version: int, expected: int) -> dict[str, Any]:
        unwilling = self.refusing if version > self.versions[worker] else self.keeping
        if self.versions[worker] != expected or worker in unwilling:
            return {"error": {"code": "swap_refused", "message": f"worker {worker} will not"}}
        self.versions[worker] = version
        return {"version": version, "previous": expected, "apply_ms": 1.0 + worker, "sha256": self.files[worker]}


async def unless_dead(question: Awaitable[None]) -> None:
    await question


def commit(core: FakeCore, *, deadline_s: float = 5.0) -> tuple[TargetCommitReport | None, list[dict[str, Any]]]:
    change = TargetChange(core, ask=core.ask, unless_dead=unless_dead)

    async def run() -> tuple[TargetCommitReport | None, list[dict[str, Any]]]:
        await change.label_base()
        return await change.commit(TargetCommitRequest(version=1, expected_active=0, deadline_s=deadline_s))

    return asyncio.run(run())


def assert_unchanged(core: FakeCore) -> None:
    assert (core.versions, core.label, core.is_paused, core.has_ended) == ([0, 0], "0", False, False)


def test_weights_and_label_change_while_nothing_runs() -> None:
    core = FakeCore()
    report, _ = commit(core)
    assert core.calls == ["label 0", "pause", "commit_target 1 0", "target_digest", "label 1", "resume"]
    assert report is not None
    assert (report.version, report.previous, report.weights_sha256, report.digest) == (1, 0, "sum", "of 1+of 1")
    assert report.apply_ms == 2.0


@pytest.mark.parametrize("refusing", [{0}, {1}, {0, 1}])
def test_where_a_worker_refuses_none_keeps_the_version(refusing: set[int]) -> None:
    core = FakeCore()
    core.refusing = refusing
    report, answers = commit(core)
    assert report is None
    assert [("error" in answer) for answer in answers] == [worker in refusing for worker in range(2)]
    assert_unchanged(core)


def test_where_a_worker_cannot_go_back_the_engine_ends() -> None:
    core = FakeCore()
    core.refusing, core.keeping = {1}, {0}
    with pytest.raises(EngineError):
        commit(core)
    assert core.has_ended


@pytest.mark.parametrize("method", ["paceline_commit_target", "paceline_target_digest"])
def test_where_nobody_can_tell_what_workers_compute_with_the_engine_ends(method: str) -> None:
    core = FakeCore()
    core.raising = {method}
    with pytest.raises(EngineError):
        commit(core)
    assert core.has_ended


def test_kv_that_cannot_be_dropped_yet_lets_requests_run_before_the_next_try() -> None:
    core = FakeCore()
    core.num_failing_pauses = 2
    report, _ = commit(core)
    assert report is not None
    assert core.calls[1:7] == ["pause", "resume"] * 2 + ["pause", "commit_target 1 0"]


def test_a_pause_that_never_works_is_given_up_at_the_deadline() -> None:
    core = FakeCore()
    core.num_failing_pauses = 1000
    with pytest.raises(TargetRefused, match=r"KV could not be dropped.*longer deadline"):
        commit(core, deadline_s=0.3)
    assert_unchanged(core)


def test_a_pause_that_never_ends_is_given_up_at_the_deadline() -> None:
    core = FakeCore()
    core.hangs_on_pause = True
    with pytest.raises(TargetRefused, match="did not pause in time"):
        commit(core, deadline_s=0.2)
    assert_unchanged(core)


def test_what_is_in_force_after_the_deadline_is_taken_back() -> None:
    core = FakeCore()
    core.apply_s = 0.2
    with pytest.raises(TargetRefused, match="took longer"):
        commit(core, deadline_s=0.1)
    assert_unchanged(core)


def test_a_version_that_cannot_be_labelled_is_taken_back() -> None:
    core = FakeCore()
    core.fails_to_label = {"1"}
    with pytest.raises(TargetRefused, match="label"):
        commit(core)
    assert_unchanged(core)


def test_workers_that_read_different_files_are_taken_back() -> None:
    core = FakeCore()
    core.files = ["sum", "another"]
    with pytest.raises(TargetRefused, match="different files"):
        commit(core)
    assert_unchanged(core)
