"""Streams that break, hang and lie, targets that change under them, workers that die: what is handed over is right all the same."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from generate_stand_in import GARBAGE, TOKENS_PER_EVENT
from generator_rig import check_groups, importable, rig, run

from rl.generator import setbacks
from rl.generator.turns import MAX_BAD_ANSWERS
from wire.errors import ConfigError, RolloutError


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    importable(monkeypatch)


@pytest.mark.parametrize("fault", ["cut", "error", "hang", "stopped"])
def test_a_stream_that_ends_early_goes_on_with_its_tokens_and_the_rest_of_its_budget(tmp_path: Path, fault: str) -> None:
    async def scenario() -> None:
        async with rig(tmp_path, silence_s=0.3, fault=lambda number: fault if number < 8 else "") as made:
            made.begin(max_turn_tokens=10)
            await made.until(lambda: len(made.groups) == 4)
            check_groups(made)
            begun, went_on = made.stand_in.bodies[:8], made.stand_in.bodies[8:]
            prompts = {tuple(body["token_ids"]) for body in begun}
            resumed = [body for body in went_on if tuple(body["token_ids"][:-TOKENS_PER_EVENT]) in prompts]
            assert len(resumed) == 8
            assert {body["sampling_params"]["max_tokens"] for body in resumed} == {10 - TOKENS_PER_EVENT}
            seeds = {body["sampling_params"]["seed"] for body in made.stand_in.bodies}
            assert len(seeds) == len(made.stand_in.bodies) == 20
            spans = {len(t.turns[0].weight_spans) for group in made.groups for t in group.trajectories}
            assert spans == {1}

    run(scenario())


def test_a_busy_gateway_is_asked_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path, fault=lambda number: "busy" if number < 6 else "") as made:
            made.begin()
            await made.until(lambda: len(made.groups) == 4)
            assert made.generator.counts.num_lost == 6
            assert made.generator.counts.num_failed_groups == 0

    run(scenario())


@pytest.mark.parametrize("kind", GARBAGE)
def test_an_answer_that_cannot_be_believed_is_counted_and_drawn_again(tmp_path: Path, kind: str) -> None:
    async def scenario() -> None:
        async with rig(tmp_path, fault=lambda number: kind if number < 4 else "") as made:
            made.begin()
            await made.until(lambda: len(made.groups) == 4)
            check_groups(made)
            assert made.generator.counts.num_bad_answers == 4
            assert made.generator.counts.num_failed_groups == 0

    run(scenario())


def test_a_prompt_that_only_ever_brings_garbage_is_given_up_and_the_run_goes_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as made:
            first = made.target.encode("Problem 0?")

            def fault(number: int) -> str:
                ids = made.stand_in.bodies[number]["token_ids"]
                return "no spans" if any(tuple(ids[i : i + len(first)]) == first for i in range(len(ids))) else ""

            made.stand_in.fault = fault
            made.begin()
            await made.until(lambda: len(made.groups) == 4)
            check_groups(made)
            assert {group.environment_seed for group in made.groups} == {1, 2, 3, 4}
            assert made.generator.counts.num_bad_answers >= MAX_BAD_ANSWERS
            assert made.generator.counts.num_failed_groups == 1

    run(scenario())


def test_what_the_gateway_refuses_is_given_up_and_the_run_goes_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path, fault=lambda number: "refuse" if number == 0 else "") as made:
            made.begin()
            await made.until(lambda: len(made.groups) == 4)
            check_groups(made)
            assert made.generator.counts.num_failed_groups == 1

    run(scenario())


def test_a_gateway_that_refuses_everything_is_asked_at_growing_intervals(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path, fault=lambda _: "refuse") as made:
            begun_s = asyncio.get_running_loop().time()
            made.begin()
            await made.until(lambda: made.generator.counts.num_failed_groups >= 16)
            # Four groups at a time: what follows the fourth wave has waited for three pauses.
            assert asyncio.get_running_loop().time() - begun_s >= 7 * setbacks.FIRST_PAUSE_S
            made.stand_in.fault = lambda _: ""
            await made.until(lambda: len(made.groups) == 4)
            check_groups(made)
            assert made.generator.counts.num_failed_groups <= 24

    run(scenario())


@pytest.mark.parametrize("is_gateway", [True, False])
def test_a_run_in_which_every_group_fails_ends_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_gateway: bool
) -> None:
    monkeypatch.setattr(setbacks, "LAST_PAUSE_S", 0.01)

    async def scenario() -> None:
        talk = {} if is_gateway else {"broken_from": 0}
        async with rig(tmp_path, talk=talk, fault=lambda _: "refuse") as made:
            made.begin()
            (error,) = await made.fails()
            assert isinstance(error, RolloutError)
            assert f"{setbacks.MAX_IN_A_ROW} times in a row" in str(error)
            assert ("400: 'too long'" if is_gateway else "there are no such problems") in str(error)
            assert made.groups == []
            assert setbacks.MAX_IN_A_ROW <= made.generator.counts.num_failed_groups <= 4 * setbacks.MAX_IN_A_ROW

    run(scenario())


def test_a_gateway_whose_engines_break_training_ends_the_run_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path, fault=lambda number: "" if number < 12 else "unable") as made:
            made.begin()
            await made.until(lambda: len(made.groups) == 4)
            assert made.ledger.take(2)
            made.change_target(1)
            errors = await made.fails()
            assert {type(error) for error in errors} == {ConfigError}
            assert "cannot serve rollouts: 501: 'its speculation accepts at random'" in str(errors[0])
            assert made.generator.counts.num_failed_groups == 0
            assert len(made.stand_in.bodies) <= 12 + 6

    run(scenario())


def test_groups_that_fail_together_are_one_setback_and_a_finished_one_ends_them() -> None:
    found = setbacks.Setbacks()
    pauses = []
    for wave in range(setbacks.MAX_IN_A_ROW - 1):
        for group_id in range(100 * wave, 100 * wave + 100):
            found.failed(group_id, "x", next_group_id=100 * wave + 100, now_s=0.0)
        pauses.append(found.paused_until_s)
    assert pauses[:3] == pytest.approx([0.1, 0.2, 0.4])
    assert pauses == sorted(pauses)
    assert pauses[-1] == setbacks.LAST_PAUSE_S
    found.succeeded()
    assert found.paused_until_s == 0.0
    for group_id in range(10_000, 10_000 + setbacks.MAX_IN_A_ROW - 1):
        found.failed(group_id, "x", next_group_id=group_id + 1, now_s=5.0)
    with pytest.raises(RolloutError, match="group 20000, because the gateway refuses it"):
        found.failed(20_000, "the gateway refuses it", next_group_id=20_001, now_s=5.0)


def test_a_target_that_changes_under_a_stream_is_in_its_spans(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path, pause_s=0.01) as made:
            made.begin()
            await made.until(lambda: made.stand_in.num_open == 8)
            made.change_target(1)
            made.stand_in.pause_s = 0.0
            await made.until(lambda: len(made.groups) == 4)
            check_groups(made)
            spans = {t.num_spans for group in made.groups for t in group.trajectories}
            assert 2 in spans
            assert made.generator.counts.num_unattributed_tokens == 0

    run(scenario())


def test_tokens_nobody_can_attribute_are_drawn_again(tmp_path: Path) -> None:
    """The target changes after four tokens, and the stream fails after eight, without a word of which target made them."""

    async def scenario() -> None:
        async with rig(tmp_path, pause_s=0.01, fault=lambda number: "" if number else "error", fault_after=8) as made:

            def before_token(number: int, index: int) -> None:
                if (number, index) == (0, 4):
                    made.change_target(1)

            made.stand_in.before_token = before_token
            made.begin(seats=1)
            await made.until(lambda: len(made.groups) == 4)
            check_groups(made)
            num_dropped = made.generator.counts.num_unattributed_tokens
            assert 4 <= num_dropped <= 8
            first = made.stand_in.bodies[0]["token_ids"]
            begun_alike = [body["token_ids"] for body in made.stand_in.bodies[1:]]
            assert any(ids[: len(first)] == first and len(ids) == len(first) + 8 - num_dropped for ids in begun_alike)

    run(scenario())


@pytest.mark.parametrize("fault", ["cut", "hang"])
def test_changes_and_breaks_together_attribute_no_token_wrongly(tmp_path: Path, fault: str) -> None:
    async def scenario() -> None:
        async with rig(tmp_path, silence_s=0.3) as made:
            made.stand_in.pause_s = 0.002

            def before_token(number: int, index: int) -> None:
                if number % 3 == 0 and index == 1 and made.stand_in.version < 7:
                    made.change_target(made.stand_in.version + 1)

            made.stand_in.before_token = before_token
            made.stand_in.fault = lambda number: fault if number % 3 == 0 and number < 30 else ""
            made.begin(seats=4)
            await made.until(lambda: len(made.groups) >= 4)
            check_groups(made)
            assert made.generator.counts.num_unattributed_tokens > 0

    run(scenario())


def test_environment_workers_that_are_killed_lose_no_rollout(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path, talk={"num_turns": 3}, num_workers=2, pause_s=0.01) as made:
            made.begin()
            await made.until(lambda: made.generator.counts.num_requests >= 10)
            for pid in made.pool.worker_pids:
                os.kill(pid, signal.SIGKILL)
            made.stand_in.pause_s = 0.0
            await made.until(lambda: len(made.groups) == 4)
            check_groups(made)
            assert made.pool.num_restarts == 2
            assert made.generator.counts.num_excluded == 0
            assert {len(t.turns) for group in made.groups for t in group.trajectories} == {3}

    run(scenario())
