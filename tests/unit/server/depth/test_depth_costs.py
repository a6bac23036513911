"""StepCosts: ratios of step times at two K, and what they say of the others."""

from __future__ import annotations

from math import log
from random import Random

import numpy as np
import pytest

from server.depth.costs import StepCosts

NOISE = 0.05**2


def posterior(prior: StepCosts, observations: list[tuple[int, int, float]]) -> tuple[np.ndarray, np.ndarray]:
    """The reference: mean and covariance of a Gaussian given all observations at once, x | Ax + noise = y."""
    mean, covariance = np.array(prior.mean), np.array(prior.covariance)
    differences = np.zeros((len(observations), len(mean)))
    for row, (depth, other, _) in enumerate(observations):
        differences[row, depth] += 1.0
        differences[row, other] -= 1.0
    values = np.array([value for _, _, value in observations])
    gains = covariance @ differences.T @ np.linalg.inv(differences @ covariance @ differences.T + NOISE * np.eye(len(values)))
    return mean + gains @ (values - differences @ mean), covariance - gains @ differences @ covariance


def test_one_update_after_the_other_gives_what_all_at_once_give() -> None:
    random = Random(3)
    observations = [(*random.sample(range(5), 2), random.gauss(0.1, 0.2)) for _ in range(40)]
    costs = StepCosts(4)
    for depth, other, value in observations:
        costs.observe(depth, other, value, NOISE)
    mean, covariance = posterior(StepCosts(4), observations)
    assert costs.mean == pytest.approx(mean.tolist())
    assert np.array(costs.covariance) == pytest.approx(covariance)


def test_repeated_comparison_finds_the_ratio() -> None:
    costs = StepCosts(3)
    before = costs.log_ratio(3, 0).deviation
    for _ in range(20):
        costs.observe(3, 0, log(1.8), NOISE)
    ratio = costs.log_ratio(3, 0)
    assert ratio.mean == pytest.approx(log(1.8), abs=0.01)
    assert ratio.deviation < before / 5


def test_a_depth_that_was_not_tried_is_interpolated() -> None:
    costs = StepCosts(3)
    for _ in range(20):
        costs.observe(3, 0, log(1.9), NOISE)
    for depth in (1, 2):
        ratio = costs.log_ratio(depth, 0)
        assert ratio.mean == pytest.approx(log(1 + 0.3 * depth), abs=0.06)
        assert costs.log_ratio(3, 0).deviation < ratio.deviation < StepCosts(3).log_ratio(depth, 0).deviation


def test_more_proposals_never_seem_to_take_less_time() -> None:
    costs = StepCosts(1)
    for _ in range(50):
        costs.observe(1, 0, -0.2, NOISE)
    assert costs.log_ratio(1, 0).mean == 0.0
    assert costs.log_ratio(0, 1).mean == 0.0


def test_another_bucket_borrows_the_ratio_but_not_the_certainty() -> None:
    costs = StepCosts(3)
    for _ in range(20):
        costs.observe(3, 0, log(1.8), NOISE)
    near, far = costs.borrowed(0.5), costs.borrowed(2.0)
    assert near.log_ratio(3, 0).mean == costs.log_ratio(3, 0).mean
    assert costs.log_ratio(3, 0).deviation < near.log_ratio(3, 0).deviation < far.log_ratio(3, 0).deviation
    assert not near.compared
    for num_octaves, other in ((0.5, near), (2.0, far)):
        assert costs.log_ratio(3, 1, num_octaves=num_octaves) == pytest.approx(other.log_ratio(3, 1))


def test_knowledge_grows_old_but_not_beyond_what_was_assumed() -> None:
    costs, assumed = StepCosts(3), StepCosts(3)
    for _ in range(20):
        costs.observe(3, 0, log(1.8), NOISE)
    fresh = costs.log_ratio(3, 0).deviation
    costs.age(600.0)
    assert costs.log_ratio(3, 0).deviation > fresh
    costs.age(1e9)
    assert costs.log_ratio(3, 0).deviation == pytest.approx(assumed.log_ratio(3, 0).deviation)


def test_surprise_is_split_between_what_was_not_known_and_noise() -> None:
    unsure, sure = StepCosts(3), StepCosts(3)
    for _ in range(50):
        sure.observe(3, 0, log(1.8), NOISE)
    assert unsure.observe(3, 0, unsure.mean[3] + 0.3, NOISE) < 0.3**2 / 5
    assert sure.observe(3, 0, sure.mean[3] + 0.3, NOISE) > 0.3**2 / 1.5
