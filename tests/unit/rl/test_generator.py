"""Problems become groups: over turns, at most so many at a time, evicted, resumed, and by settings that can be trained on."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import msgspec
import pytest
from generate_stand_in import FIRST
from generator_rig import FORGETFUL, TALK, Rig, check_groups, importable, rig, run

from rl.controllers.concurrency import ConcurrencyReading
from rl.environments.interface import Problem
from rl.generator.config import GeneratorSettings
from rl.generator.probe import probe
from rl.generator.state import GeneratorState
from rl.staleness.ledger import Ledger, LedgerState
from wire.errors import ConfigError
from wire.spec import SCHEMA_VERSION


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    importable(monkeypatch)


def output_lengths(rig: Rig) -> set[int]:
    return {trajectory.num_output_tokens for group in rig.groups for trajectory in group.trajectories}


def test_groups_are_handed_over_complete_and_as_many_as_the_ledger_admits(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as made:
            made.begin()
            await made.until(lambda: len(made.groups) == 4)
            check_groups(made)
            assert made.ledger.capacity == 0
            assert made.ledger.num_waiting == 4
            assert output_lengths(made) == {13}
            body = made.stand_in.bodies[0]
            sampling = body["sampling_params"]
            assert (sampling["temperature"], sampling["logprobs"], sampling["max_tokens"]) == (1.0, 0, 256)
            assert (body["cache_salt"], body["stream"]) == ("0", True)
            assert 1 <= body["priority"] <= 1000
            seeds = [body["sampling_params"]["seed"] for body in made.stand_in.bodies]
            assert len(set(seeds)) == len(seeds) == 12
            turn = made.groups[0].trajectories[0].turns[0]
            assert (turn.draft_version, turn.finish_reason) == (4, "stop")

    run(scenario())


def test_a_later_turn_goes_on_from_the_very_tokens_before_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path, talk={"num_turns": 3}) as made:
            made.begin()
            await made.until(lambda: len(made.groups) == 4)
            check_groups(made)
            prompts = {tuple(body["token_ids"]) for body in made.stand_in.bodies}
            for trajectory in [trajectory for group in made.groups for trajectory in group.trajectories]:
                context: tuple[int, ...] = ()
                assert len(trajectory.turns) == 3
                for turn in trajectory.turns:
                    context += turn.prompt_token_ids
                    assert context in prompts
                    context += turn.output_token_ids
                told = made.target.decode(context, special=True)
                assert told.count("Go on") == 2
                assert "<|im_end|>\n<|im_start|>user\nGo on 1.<|im_end|>\n<|im_start|>assistant\n" in told
            assert made.generator.counts.num_forks == 0

    run(scenario())


def test_a_conversation_the_template_renders_anew_is_forked_and_said_to_be(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path, talk={"num_turns": 3}, template=FORGETFUL) as made:
            made.begin()
            await made.until(lambda: made.groups)
            check_groups(made)
            trajectories = made.groups[0].trajectories
            assert [trajectory.forked_from for trajectory in trajectories] == [None, None, None, 0, 3, 1, 5, 2, 7]
            assert {len(trajectory.turns) for trajectory in trajectories} == {1}
            assert len({trajectory.reward for trajectory in trajectories}) == 1
            last = made.target.decode(trajectories[4].turns[0].prompt_token_ids, special=True)
            assert last.count("...") == 2
            assert made.generator.counts.num_forks >= 6

    run(scenario())


def test_an_answer_ends_at_the_limit_of_a_turn_a_rollout_or_the_context(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path, talk={"num_turns": 3}) as made:
            made.begin(max_turn_tokens=5, max_output_tokens=12)
            await made.until(lambda: made.groups)
            check_groups(made)
            turns = made.groups[0].trajectories[0].turns
            assert [(len(turn.output_token_ids), turn.finish_reason) for turn in turns] == [
                (5, "length"),
                (5, "length"),
                (2, "length"),
            ]
            num_prompt_tokens = len(turns[0].prompt_token_ids)
            await made.end()
            made.ledger, made.groups = Ledger(LedgerState(version=0), eta=1, groups_per_version=2), []
            made.begin(max_context_tokens=num_prompt_tokens + 4)
            await made.until(lambda: made.groups)
            assert output_lengths(made) == {4}

    run(scenario())


def test_no_more_rollouts_than_the_cap_are_in_the_engines(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path, pause_s=0.002) as made:
            began_s = asyncio.get_running_loop().time()
            made.begin(seats=2)
            await made.until(lambda: len(made.groups) == 4)
            assert made.stand_in.most_open == 2
            assert 0.0 < made.generator.seat_s <= 2.0 * (asyncio.get_running_loop().time() - began_s)

    run(scenario())


def test_rollouts_taken_back_for_want_of_kv_keep_their_tokens_and_go_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path, pause_s=0.02) as made:
            made.begin(seats=1)
            made.generator.observe(ConcurrencyReading(1.0, 0.1, 1, 0, 0, 0.0, 0.0))
            made.generator.observe(ConcurrencyReading(2.0, 0.1, 1, 0, 0, 0.0, 9.0))
            made.generator.observe(ConcurrencyReading(3.0, 0.1, 2, 0, 0, 0.0, 99.0))
            await made.until(lambda: made.stand_in.num_open >= 2)
            decision = made.generator.observe(ConcurrencyReading(4.0, 0.95, 2, 0, 0, 0.0, 99.0))
            assert (decision.cap, decision.num_taken_back) == (1, 1)
            await made.until(lambda: made.generator.num_preempted >= 1)
            made.stand_in.pause_s = 0.0
            await made.until(lambda: len(made.groups) == 4)
            check_groups(made)
            assert made.generator.counts.num_unattributed_tokens == 0

    run(scenario())


def test_a_group_the_ledger_evicts_is_given_up_and_its_prompt_asked_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path, pause_s=0.01) as made:
            made.begin()
            await made.until(lambda: made.stand_in.num_open == 8)
            made.stand_in.answer_tokens = 4000
            first = {entry.group_id for entry in made.ledger.state.open}
            made.change_target(2)
            await made.until(lambda: made.generator.counts.num_abandoned_groups == 4)
            await made.until(lambda: len(made.ledger.state.open) == 4)
            assert not first & {entry.group_id for entry in made.ledger.state.open}
            assert {entry.environment_seed for entry in made.ledger.state.open} == first
            made.stand_in.answer_tokens, made.stand_in.pause_s = 12, 0.0
            await made.until(lambda: len(made.groups) == 4)
            assert made.stand_in.num_open == 0
            check_groups(made)
            assert {group.oldest_version for group in made.groups} == {2}

    run(scenario())


def is_half_way(state: GeneratorState) -> bool:
    """One rollout has a whole turn, and one has tokens of a turn that has not ended."""
    rollouts = [rollout for group in state.groups for rollout in group.rollouts]
    has_partial = any(rollout.partial and rollout.partial.output_token_ids for rollout in rollouts)
    return has_partial and any(rollout.turns for rollout in rollouts)


def test_a_stopped_run_goes_on_from_a_checkpoint_with_the_tokens_it_had(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path, talk={"num_turns": 2}, pause_s=0.005) as made:
            made.begin()
            await made.until(lambda: is_half_way(made.generator.state()))
            handed_over = len(made.groups)
            state, ledger = made.generator.state(), made.ledger.state
            await made.end()
            state = msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=GeneratorState)
            saved = [rollout for group in state.groups for rollout in group.rollouts]
            kept = {rollout.turns[0].turn.output_token_ids for rollout in saved if rollout.turns}
            partial = [rollout.partial for rollout in saved if rollout.partial and rollout.partial.output_token_ids]
            assert {turn.draft_version for turn in partial} == {4}
            del made.groups[handed_over:]
            made.ledger, _ = Ledger.resume(ledger, 0, eta=1, groups_per_version=2)
            num_before = len(made.stand_in.bodies)
            made.begin(state)
            await made.until(lambda: len(made.groups) == 4)
            check_groups(made)
            assert kept <= {t.turns[0].output_token_ids for group in made.groups for t in group.trajectories}
            assert all(len(trajectory.turns) == 2 for group in made.groups for trajectory in group.trajectories)
            asked = [body["token_ids"] for body in made.stand_in.bodies[num_before:]]
            for turn in partial:
                has_ended = turn.output_token_ids[-1] == made.stand_in.eos_id
                assert has_ended or any(tuple(ids[-len(turn.output_token_ids) :]) == turn.output_token_ids for ids in asked)

    run(scenario())


def test_open_groups_of_another_release_are_refused_with_both_schemas() -> None:
    raw = msgspec.msgpack.decode(msgspec.msgpack.encode(GeneratorState()))
    with pytest.raises(msgspec.ValidationError, match=f"open groups of schema 99, this process reads {SCHEMA_VERSION}"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(raw | {"schema_version": 99}), type=GeneratorState)


def test_running_groups_nothing_is_known_of_are_evicted_on_resuming(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as made:
            lost = made.ledger.submit("talk", 77)
            made.begin()
            await made.until(lambda: len(made.groups) == 4)
            assert lost.group_id not in {group.group_id for group in made.groups}
            check_groups(made)

    run(scenario())


@pytest.mark.parametrize("seed", range(2))
def test_a_run_over_many_updates_loses_nothing_and_counts_nothing_twice(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    kinds = ["", "", "", "cut", "error", "busy", "stopped", "no spans", "too many tokens"]

    async def scenario() -> None:
        async with rig(tmp_path, talk={"num_turns": 2}, num_workers=2, fault=lambda _: rng.choice(kinds)) as made:
            made.stand_in.pause_s = 0.001
            made.begin()
            await made.train(7)
            check_groups(made)
            counts = made.generator.counts
            assert counts.num_groups == len(made.groups)
            assert counts.num_lost > 0
            assert counts.num_bad_answers > 0
            submitted = made.ledger.state.next_group_id
            handed_over = {group.group_id for group in made.groups}
            running = {entry.group_id for entry in made.ledger.state.open if entry.finished_rank is None}
            assert not handed_over & running
            assert submitted >= len(handed_over | running)

    run(scenario())


def test_settings_that_leave_nothing_to_learn_from_are_refused() -> None:
    for table, key in (({"temperature": 0.0}, "temperature"), ({"top_p": 0.9}, "top_p"), ({"group_size": 1}, "group_size")):
        with pytest.raises(ConfigError, match=key):
            GeneratorSettings.build(table, source="test")


def test_the_probe_gives_the_targets_version(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path, version=5) as made:
            assert await probe(made.gateway, token_ids=(FIRST,)) == 5

    run(scenario())


def test_the_probe_refuses_log_probabilities_of_another_distribution(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path, probability_scale=lambda temperature: 1.0) as made:
            with pytest.raises(ConfigError, match="not of the distribution tokens are drawn from"):
                await probe(made.gateway, token_ids=(FIRST,))

    run(scenario())


@pytest.mark.parametrize("status", [404, 501])
def test_the_probe_passes_the_gateways_reason_on(tmp_path: Path, status: int) -> None:
    async def scenario() -> None:
        async with rig(tmp_path, problem=(status, "its speculation accepts at random")) as made:
            with pytest.raises(ConfigError, match="its speculation accepts at random"):
                await probe(made.gateway, token_ids=(FIRST,))

    run(scenario())


def test_a_broken_environment_is_excluded_and_another_problem_takes_its_place(tmp_path: Path) -> None:
    async def scenario() -> None:
        environments = [TALK, TALK | {"name": "broken", "parameters": {"broken_from": 0}}]
        async with rig(tmp_path, environments=environments) as made:
            made.problem_of = lambda group_id: Problem("talk" if group_id % 2 else "broken", group_id)
            made.begin()
            await made.until(lambda: len(made.groups) == 4)
            check_groups(made)
            assert {group.environment for group in made.groups} == {"talk"}
            assert made.generator.counts.num_failed_groups >= 4
            assert made.generator.counts.num_excluded >= 8
            assert made.ledger.state.owed == ()

    run(scenario())
