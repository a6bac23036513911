"""Wishes for another target: what passes is waited for, what would come again is said, and no lost answer is taken for a no."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from admin_stand_in import TOKEN, AdminStandIn
from generate_stand_in import GenerateStandIn
from generator_rig import run
from samples import fill_target

from rl.run import updates
from rl.run.admin import Admin, AdminSilent
from rl.run.updates import MAX_FAILURES, UpdateFailed, Updates


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(updates, "_FAILURE_PAUSE_S", 0.001)


def activated(tmp_path: Path, faults: Sequence[str], check: Callable[[AdminStandIn], None]) -> None:
    """Ask for version 1 where 0 is active; raises what that raises."""

    async def scenario() -> None:
        engines = GenerateStandIn()
        wanted = dict(enumerate(faults))
        async with AdminStandIn(tmp_path, engines, lambda number: wanted.get(number, "")) as stand_in:
            stand_in.store.publish(fill_target)
            admin = Admin(stand_in.url, TOKEN)
            try:
                await Updates(admin, patience_s=20.0).activate(1, expected_active=0, reason="a test")
            finally:
                await admin.close()
                check(stand_in)

    run(scenario())


def serves_one(stand_in: AdminStandIn) -> None:
    assert stand_in.engines.version == 1


def serves_zero(stand_in: AdminStandIn) -> None:
    assert stand_in.engines.version == 0


@pytest.mark.parametrize(
    "faults",
    [
        [],
        ["swap_in_progress"],
        ["no_engine_ready"] * 5,
        ["swap_refused"] * 5,
        ["gone"],
        ["lost"],
        ["commit_failed", "engine_error"],
        ["engine_error", "commit_failed", "no_engine_ready"],
    ],
)
def test_what_passes_is_waited_for(tmp_path: Path, faults: list[str]) -> None:
    activated(tmp_path, faults, serves_one)


def test_a_wish_without_an_answer_is_repeated_under_its_key_and_a_refused_one_is_not(tmp_path: Path) -> None:
    def check(stand_in: AdminStandIn) -> None:
        serves_one(stand_in)
        silent, again, anew = stand_in.keys
        assert silent == again != anew

    activated(tmp_path, ["gone", "commit_failed"], check)


def test_the_gateway_has_time_to_find_a_dead_engine_before_a_failed_change_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(updates, "_FAILURE_PAUSE_S", 0.2)
    started_s = time.monotonic()
    activated(tmp_path, ["engine_error"], serves_one)
    assert time.monotonic() - started_s >= 0.2


@pytest.mark.parametrize("fault", ["commit_failed", "engine_error"])
def test_a_change_that_is_taken_back_each_time_is_given_up(tmp_path: Path, fault: str) -> None:
    def check(stand_in: AdminStandIn) -> None:
        serves_zero(stand_in)
        assert len(stand_in.wishes) == MAX_FAILURES

    with pytest.raises(UpdateFailed, match=f"target 1 is refused .{fault}.: it is {fault}"):
        activated(tmp_path, [fault] * 9, check)


def test_a_refusal_that_would_come_again_is_not_asked_for_twice(tmp_path: Path) -> None:
    def check(stand_in: AdminStandIn) -> None:
        serves_zero(stand_in)
        assert len(stand_in.wishes) == 1

    with pytest.raises(UpdateFailed, match="bad_artifact"):
        activated(tmp_path, ["bad_artifact"], check)


def test_somebody_else_who_changed_the_target_is_named(tmp_path: Path) -> None:
    async def scenario() -> None:
        engines = GenerateStandIn(version=3)
        async with AdminStandIn(tmp_path, engines, lambda number: "") as stand_in:
            stand_in.store.publish(fill_target)
            admin = Admin(stand_in.url, TOKEN)
            with pytest.raises(UpdateFailed, match="somebody else changed the target"):
                await Updates(admin).activate(1, expected_active=2, reason="")
            assert engines.version == 3
            assert await Updates(admin).require(1) == 3
            assert await Updates(admin).require(1) == 1
            assert len(stand_in.wishes) == 2
            await admin.close()

    run(scenario())


def test_a_gateway_that_is_not_there_is_said_so() -> None:
    async def scenario() -> None:
        admin = Admin("http://127.0.0.1:9", TOKEN)
        with pytest.raises(AdminSilent, match="is the system up"):
            await Updates(admin).require(1)
        await admin.close()

    run(scenario())
