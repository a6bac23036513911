"""Streams that break, hang and lie, targets that change under them, workers that die: what is handed over is right all the same."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from generate_stand_in import GARBAGE, TOKENS_PER_EVENT
from generator_rig import check_groups, importable, rig, run

from rl.generator.turns import MAX_BAD_ANSWERS


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
