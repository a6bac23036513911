from __future__ import annotations

from math import inf, nan

import msgspec
import pytest
from rl_samples import make_group, make_trajectory, make_turn

from rl.trajectory import Group, RewardPart, Timings, WeightSpan, decode_group, encode_group
from wire.errors import RolloutError, SchemaMismatch
from wire.spec import SCHEMA_VERSION


def spans(*limits: tuple[int, int, int]) -> tuple[WeightSpan, ...]:
    return tuple(WeightSpan(target_version=version, start=start, end=end) for version, start, end in limits)


def test_a_group_comes_back_from_its_bytes_as_it_was() -> None:
    group = make_group(4, versions=(3, 3, 4))
    assert decode_group(encode_group(group)) == group


def test_the_oldest_token_of_any_turn_dates_a_trajectory() -> None:
    trajectory = make_trajectory(turns=(make_turn((5, 6)), make_turn((6, 6, 7))))
    assert trajectory.oldest_version == 5
    assert trajectory.token_versions == [5, 6, 6, 6, 7]
    assert trajectory.num_spans == 3
    assert trajectory.num_output_tokens == 5


def test_a_reward_is_the_weighted_sum_of_its_parts() -> None:
    parts = (
        RewardPart(name="right", value=1.0),
        RewardPart(name="length", value=-0.5, weight=0.2),
        RewardPart(name="seen", value=9.0, weight=0.0),
    )
    assert make_trajectory(reward_parts=parts).reward == pytest.approx(0.9)


def test_a_failed_rollout_is_in_its_group_and_has_no_reward() -> None:
    failed = make_trajectory(sample_index=1, reward_parts=(), failure="sandbox died")
    group = Group(trajectories=(make_trajectory(), failed))
    assert [trajectory.sample_index for trajectory in group.scored] == [0]
    with pytest.raises(RolloutError, match="sandbox died"):
        _ = failed.reward


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"output_token_ids": (), "behaviour_logprobs": (), "weight_spans": ()}, "no output tokens"),
        ({"behaviour_logprobs": (-0.5, -0.5)}, "3 output tokens and 2 behaviour log-probabilities"),
        ({"behaviour_logprobs": (-0.5, 0.1, -0.5)}, r"token 1 has log-probability 0\.1"),
        ({"behaviour_logprobs": (-0.5, -0.5, -inf)}, "token 2 has log-probability -inf"),
        ({"behaviour_logprobs": (nan, -0.5, -0.5)}, "token 0 has log-probability nan"),
        ({"output_token_ids": (1, -2, 3)}, "output token 1 has id -2"),
        ({"prompt_token_ids": (-1,)}, "prompt token 0 has id -1"),
        ({"weight_spans": spans((3, 0, 2))}, "cover 2 of 3"),
        ({"weight_spans": spans((3, 0, 4))}, "cover 4 of 3"),
        ({"weight_spans": spans((3, 0, 1), (4, 2, 3))}, r"version 4 is \[2, 3\) where one from 1 on is due"),
        ({"weight_spans": spans((3, 0, 2), (4, 1, 3))}, r"version 4 is \[1, 3\) where one from 2 on is due"),
        ({"weight_spans": spans((4, 2, 3), (3, 0, 2))}, r"version 4 is \[2, 3\) where one from 0 on is due"),
        ({"weight_spans": spans((3, 0, 0), (4, 0, 3))}, r"version 3 is \[0, 0\)"),
        ({"weight_spans": spans((-1, 0, 3))}, "version -1"),
        ({"finish_reason": "tired"}, "'tired'"),
    ],
)
def test_a_turn_that_contradicts_itself_is_refused(changes: dict[str, object], complaint: str) -> None:
    with pytest.raises(RolloutError, match=complaint):
        make_turn(**changes)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"temperature": -1.0}, r"temperature -1\.0"),
        ({"temperature": inf}, "temperature inf"),
        ({"turns": ()}, "no turns"),
        ({"turns": (make_turn(prompt_token_ids=()),)}, "empty prompt"),
        ({"reward_parts": ()}, "0 reward parts and failure None"),
        ({"failure": "late"}, "1 reward parts and failure 'late'"),
        ({"sample_index": -1}, "count from 0"),
    ],
)
def test_a_trajectory_that_contradicts_itself_is_refused(changes: dict[str, object], complaint: str) -> None:
    with pytest.raises(RolloutError, match=complaint):
        make_trajectory(**changes)


def test_another_schema_is_an_error_that_names_both() -> None:
    with pytest.raises(SchemaMismatch, match=f"schema {SCHEMA_VERSION + 1}, this process reads {SCHEMA_VERSION}"):
        make_trajectory(schema_version=SCHEMA_VERSION + 1)


def test_times_that_run_backwards_and_rewards_without_end_are_refused() -> None:
    with pytest.raises(RolloutError, match="run backwards"):
        Timings(submitted_s=3.0, generated_s=2.0, scored_s=4.0)
    with pytest.raises(RolloutError, match="'right' is nan"):
        RewardPart(name="right", value=nan)


def test_a_group_is_of_one_prompt_and_holds_each_sample_once() -> None:
    with pytest.raises(RolloutError, match="rollout 1 of group 0 calls itself sample 0"):
        Group(trajectories=(make_trajectory(), make_trajectory()))
    with pytest.raises(RolloutError, match="environment_seed 8, the first has 7"):
        Group(trajectories=(make_trajectory(), make_trajectory(sample_index=1, environment_seed=8)))
    with pytest.raises(RolloutError, match="a prompt of its own"):
        Group(trajectories=(make_trajectory(), make_trajectory(sample_index=1, turns=(make_turn(prompt_token_ids=(9,)),))))


def test_bytes_that_hold_a_bad_trajectory_are_refused_with_its_complaint() -> None:
    raw = msgspec.msgpack.decode(encode_group(make_group(0)))
    raw["trajectories"][0]["turns"][0]["behaviour_logprobs"][1] = 0.25
    with pytest.raises(RolloutError, match=r"token 1 has log-probability 0\.25"):
        decode_group(msgspec.msgpack.encode(raw))
    with pytest.raises(RolloutError, match="not a group"):
        decode_group(b"\xc1")


def test_a_fork_has_a_prompt_of_its_own_in_its_group_and_goes_on_from_one_before_it() -> None:
    turns = (make_turn(prompt_token_ids=(9, 9)),)
    fork = make_trajectory(sample_index=1, turns=turns, forked_from=0)
    assert decode_group(encode_group(Group(trajectories=(make_trajectory(), fork)))).trajectories[1].forked_from == 0
    with pytest.raises(RolloutError, match="prompt of its own"):
        Group(trajectories=(make_trajectory(), make_trajectory(sample_index=1, turns=turns)))
    with pytest.raises(RolloutError, match="forked from sample 1"):
        make_trajectory(sample_index=1, forked_from=1)
