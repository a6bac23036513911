from __future__ import annotations

import numpy as np
import pytest
from toy_speculation import draw_answers

from rl.consistency import two_sample
from rl.consistency.two_sample import same_distribution, same_mean
from rl.consistency.two_sample_reference import statistic
from wire.errors import RolloutError


def drawn(kind, seed: int, *, num_prompts: int = 3, count: int = 16):
    return [draw_answers(kind, prompt, count, seed * 1000 + prompt) for prompt in range(num_prompts)]


def test_the_statistic_is_the_one_from_plain_counts() -> None:
    on, off = drawn("exact", 1, count=9), drawn("plain", 2, count=14)
    found = same_distribution(on, off, seed=0, num_permutations=10)
    assert found.statistic == pytest.approx(statistic(on, off))


def test_the_statistic_is_the_same_however_features_are_cut_into_blocks(monkeypatch) -> None:
    on, off = drawn("exact", 1, count=9), drawn("plain", 2, count=14)
    monkeypatch.setattr(two_sample, "_BLOCK", 7)
    found = same_distribution(on, off, seed=0, num_permutations=10)
    assert found.statistic == pytest.approx(statistic(on, off))


def test_exact_speculation_cannot_be_told_from_none() -> None:
    p_values = [
        same_distribution(drawn("exact", seed), drawn("plain", 500 + seed), seed=seed, num_permutations=199).p_value
        for seed in range(40)
    ]
    # Uniform on [0, 1]: 2 of 40 below 0.05 are expected, more than 7 come about once in two thousand times.
    assert sum(p <= 0.05 for p in p_values) <= 7
    assert np.mean(p_values) == pytest.approx(0.5, abs=0.12)


def test_a_wrong_residual_is_found() -> None:
    found = same_distribution(
        drawn("wrong residual", 1, num_prompts=4, count=200),
        drawn("plain", 2, num_prompts=4, count=200),
        seed=0,
        num_permutations=999,
    )
    assert found.p_value == 0.001


def test_the_same_seed_gives_the_same_verdict() -> None:
    on, off = drawn("exact", 3), drawn("plain", 4)
    first, again, other = (same_distribution(on, off, seed=seed, num_permutations=200) for seed in (5, 5, 6))
    assert first == again
    assert first.statistic == other.statistic


def test_equal_samples_have_the_largest_p_value() -> None:
    on = drawn("plain", 1)
    assert same_distribution(on, on, seed=0, num_permutations=100).p_value == 1.0


@pytest.mark.parametrize(("num_on", "num_off"), [(3, 7), (10, 13), (5, 9), (1, 1)])
def test_samples_without_any_difference_are_not_told_apart_by_rounding(num_on: int, num_off: int) -> None:
    assert same_distribution([[[1, 2, 3]] * num_on], [[[1, 2, 3]] * num_off], seed=0, num_permutations=200).p_value == 1.0
    assert same_mean([1e-6] * num_on, [1e-6] * num_off, seed=0, num_permutations=200).p_value == 1.0


def test_means_are_compared_by_shuffling_rollouts() -> None:
    generator = np.random.default_rng(0)
    floor = generator.gamma(2.0, 2e-6, size=60).tolist()
    same = generator.gamma(2.0, 2e-6, size=80).tolist()
    assert same_mean(floor, same, seed=0).p_value > 0.05
    assert same_mean(floor, [value * 1.8 for value in same], seed=0).p_value < 0.01
    # Of the 20 ways to label three and three, two put the halves as far apart as they are.
    assert same_mean([1.0, 2.0, 3.0], [11.0, 12.0, 13.0], seed=0, num_permutations=20_000).p_value == pytest.approx(
        0.1, abs=0.01
    )


def test_sides_that_do_not_pair_up_are_refused() -> None:
    with pytest.raises(RolloutError, match="2 prompts with speculation, 1 without"):
        same_distribution([[[1]], [[2]]], [[[1]]], seed=0)
    with pytest.raises(RolloutError, match="prompt 1 has 1 answers with speculation and 0 without"):
        same_distribution([[[1]], [[2]]], [[[1]], []], seed=0)
