from __future__ import annotations

import numpy as np
import pytest
from msgspec import structs
from rl_samples import make_trajectory, make_turn

from rl.rewards.combination import combine
from rl.rewards.config import RewardSettings
from rl.rewards.length_guard import length_report
from rl.trajectory import Group, RewardPart
from wire.errors import RolloutError


def test_weights_of_the_run_replace_the_environments_and_nothing_is_left_out():
    parts = [RewardPart("correct", 1.0), RewardPart("brevity", 0.5, 0.5), RewardPart("seen", 1.0, 0.0)]
    settings = RewardSettings(weights={"brevity": 0.2, "seen": 0.1})
    assert combine(parts, settings) == (
        RewardPart("correct", 1.0),
        RewardPart("brevity", 0.5, 0.2),
        RewardPart("seen", 1.0, 0.1),
    )


def test_a_condition_keeps_a_part_from_counting_where_the_answer_is_wrong():
    settings = RewardSettings(only_if={"brevity": "correct"})

    def total(correct: float) -> float:
        return make_trajectory(
            reward_parts=combine([RewardPart("correct", correct), RewardPart("brevity", 0.5)], settings)
        ).reward

    assert (total(1.0), total(0.9), total(0.0)) == (1.5, 0.9, 0.0)
    with pytest.raises(RolloutError, match=r"only_if\.brevity"):
        combine([RewardPart("brevity", 0.5)], settings)
    with pytest.raises(RolloutError, match="different names"):
        combine([RewardPart("correct", 0.5), RewardPart("correct", 1.0)], settings)


def groups_of(rollouts: list[list[tuple[int, float, float]]]) -> list[Group]:
    """By group: (tokens, what the rule says, what else is earned)."""
    return [
        Group(
            trajectories=tuple(
                make_trajectory(
                    group_id=number,
                    sample_index=index,
                    turns=(make_turn([0] * length),),
                    reward_parts=(RewardPart("correct", right), RewardPart("model", more)),
                )
                for index, (length, right, more) in enumerate(members)
            )
        )
        for number, members in enumerate(rollouts)
    ]


def test_reward_that_grows_with_length_among_equally_right_answers_is_an_alarm():
    hacked = groups_of([[(4 + k + g, float(k % 2), 0.05 * k) for k in range(8)] for g in range(4)])
    found = length_report(hacked, "correct", 0.3)
    assert found.among_equally_right.correlation == pytest.approx(1.0)
    assert len(found.alarms) == 1
    assert "longer" in found.alarms[0]
    lazy = groups_of([[(20 - k, 1.0, 0.05 * k) for k in range(8)] for _ in range(4)])
    assert "shorter" in length_report(lazy, "correct", 0.3).alarms[0]


def test_length_by_prompt_or_by_chance_is_none():
    generator = np.random.default_rng(3)
    hard_is_long = groups_of(
        [[(5 * g + int(n), float(r), 0.0) for n, r in generator.integers(1, (6, 2), (8, 2))] for g in range(1, 9)]
    )
    noise = groups_of([[(int(n), float(r), 0.0) for n, r in generator.integers((1, 0), (9, 2), (8, 2))] for _ in range(16)])
    for groups in (hard_is_long, noise):
        found = length_report(groups, "correct", 0.3)
        assert found.alarms == ()
        assert found.among_equally_right.num_rollouts == 0


def test_right_answers_that_are_longer_are_told_from_length_for_its_own_sake():
    groups = groups_of([[(4 + 4 * (k % 2) + k // 4, float(k % 2), 0.0) for k in range(8)] for _ in range(4)])
    found = length_report(groups, "correct", 0.3)
    assert found.among_group.correlation > 0.9
    assert found.among_equally_right.num_rollouts == 0
    assert "right more often" in found.alarms[0]


def test_the_correlation_is_pearsons_of_deviations_from_the_groups_means():
    generator = np.random.default_rng(1)
    drawn = [
        [(int(n), 0.0, round(float(x), 3)) for n, x in zip(generator.integers(1, 9, 6), generator.random(6), strict=True)]
        for _ in range(5)
    ]
    centred = [np.asarray([(n, x) for n, _, x in members]) - np.mean([(n, x) for n, _, x in members], 0) for members in drawn]
    wanted = np.corrcoef(np.concatenate(centred).T)[0, 1]
    assert length_report(groups_of(drawn), "correct", 0.3).among_group.correlation == pytest.approx(wanted)


def test_a_forked_rollout_is_one_observation_as_long_as_all_its_trajectories():
    drawn = [[(3 + (5 * k + g) % 7, 1.0, round(0.1 * ((3 * k + g) % 5), 1)) for k in range(6)] for g in range(4)]
    whole = groups_of([[(3 * length, right, more) for length, right, more in members] for members in drawn])
    forked = [
        Group(
            trajectories=(
                *group.trajectories,
                *(
                    structs.replace(before, sample_index=6 * fork + index, forked_from=6 * (fork - 1) + index)
                    for fork in (1, 2)
                    for index, before in enumerate(group.trajectories)
                ),
            )
        )
        for group in groups_of(drawn)
    ]
    found = length_report(forked, "correct", 0.3)
    assert found.among_group.num_rollouts == 24
    assert found == length_report(whole, "correct", 0.3)


def test_chance_is_called_chance_however_small_the_groups_are():
    generator = np.random.default_rng(0)

    def p_value() -> float:
        pairs = [
            [(int(n), 0.0, float(x)) for n, x in zip(generator.permutation(40)[:2] + 1, generator.random(2), strict=True)]
            for _ in range(12)
        ]
        return length_report(groups_of(pairs), "correct", 0.3).among_group.p_value

    assert np.mean([p_value() < 0.1 for _ in range(200)]) == pytest.approx(0.1, abs=0.06)
