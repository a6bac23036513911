from __future__ import annotations

from dataclasses import replace
from math import exp

import numpy as np
import pytest
from msgspec import structs
from rl_samples import make_trajectory, make_turn

from rl.algorithms.counts import TokenCounts
from rl.consistency import divergence_reference as reference
from rl.consistency.alarms import FLOORS, HEALTH, alarms
from rl.consistency.divergence import BUCKET_EDGES, DivergenceReport, measure
from rl.consistency.rescored import Rescored
from wire.errors import RolloutError

VERSIONS = [[3] * 40 + [4] * 30, [4] * 80, [3, 4, 3, 5] * 20]


def rescored(spread: float, seed: int = 0) -> Rescored:
    generator = np.random.default_rng(seed)
    count = sum(len(each) for each in VERSIONS)
    behaviour_T = -generator.exponential(2.0, size=count)
    sequence_T = np.repeat(np.arange(3), [len(each) for each in VERSIONS])
    trainer_T = behaviour_T + spread * generator.standard_normal(count)
    return Rescored(behaviour_T, trainer_T, np.concatenate(VERSIONS).astype(np.int64), sequence_T)


@pytest.mark.parametrize("spread", [3e-6, 0.02, 0.3])
def test_the_report_is_the_plain_one(spread: float) -> None:
    tokens = rescored(spread)
    report = measure(tokens, TokenCounts())
    behaviour, trainer = tokens.behaviour_T.tolist(), tokens.trainer_T.tolist()
    differences = [pi - mu for pi, mu in zip(trainer, behaviour, strict=True)]
    weights = [exp(difference) for difference in differences]
    assert structs.astuple(report.abs_logprob) == pytest.approx(reference.abs_logprob(differences))
    for bucket in report.buckets:
        expected = reference.abs_logprob(reference.in_bucket(behaviour, trainer, bucket.low, bucket.high))
        assert structs.astuple(bucket.abs_logprob) == pytest.approx(expected)
    assert report.k1 == pytest.approx(-reference.mean(differences))
    assert report.k3 == pytest.approx(reference.k3(differences), rel=1e-6)
    assert report.mult_prob_error == pytest.approx(reference.mean([exp(abs(difference)) for difference in differences]))
    assert report.ess == pytest.approx(reference.ess(weights))
    assert report.is_mean == pytest.approx(reference.mean(weights))
    assert report.is_std == pytest.approx(reference.std(weights), rel=1e-6)
    spans = reference.spans(VERSIONS)
    assert (report.spans_mean, report.spans_max) == (pytest.approx(reference.mean(spans)), max(spans))
    assert report.num_versions == 3


def test_buckets_cover_every_token_once() -> None:
    report = measure(rescored(0.1), TokenCounts())
    assert sum(bucket.abs_logprob.num_tokens for bucket in report.buckets) == report.abs_logprob.num_tokens
    certain = Rescored(np.zeros(3), np.zeros(3), np.zeros(3, np.int64), np.zeros(3, np.int64))
    assert measure(certain, TokenCounts()).buckets[-1].abs_logprob.num_tokens == 3
    assert (BUCKET_EDGES[0], BUCKET_EDGES[-1]) == (0.0, 1.0)


def test_a_report_by_hand() -> None:
    tokens = Rescored(np.log([0.5, 0.005]), np.log([0.25, 0.015]), np.array([1, 2]), np.array([0, 0]))
    report = measure(tokens, TokenCounts(num_tokens=10, num_masked=2, num_truncated=3, num_clipped_high=1, num_clipped_low=3))
    assert report.abs_logprob.max == pytest.approx(np.log(3.0))
    assert (report.is_mean, report.is_std) == pytest.approx((1.75, 1.25))
    assert report.ess == pytest.approx(1.75**2 / ((0.25 + 9.0) / 2))
    assert report.mult_prob_error == pytest.approx(2.5)
    assert report.k1 == pytest.approx((np.log(2.0) - np.log(3.0)) / 2)
    assert report.k3 == pytest.approx((0.5 - 1 + np.log(2.0) + 3 - 1 - np.log(3.0)) / 2)
    assert (report.masked_fraction, report.truncated_fraction, report.clipped_fraction) == (0.2, 0.3, 0.4)
    assert (report.spans_max, report.num_versions) == (2, 2)


def test_tokens_come_from_trajectories_in_order_and_are_chosen_by_version() -> None:
    trajectories = [make_trajectory((3, 4)), make_trajectory(turns=(make_turn((4,)), make_turn((5, 5))))]
    tokens = Rescored.of(trajectories, [[-0.4, -0.6], [-0.5, -0.5, -0.9]])
    assert tokens.version_T.tolist() == [3, 4, 4, 5, 5]
    assert tokens.sequence_T.tolist() == [0, 0, 1, 1, 1]
    assert tokens.of_version(4).trainer_T.tolist() == [-0.6, -0.5]
    assert tokens.abs_means().tolist() == pytest.approx([0.1, 0.4 / 3])
    with pytest.raises(RolloutError, match="2 output tokens and 1 trainer"):
        Rescored.of(trajectories[:1], [[-0.4]])
    with pytest.raises(RolloutError, match="2 trajectories and log-probabilities of 1"):
        Rescored.of(trajectories, [[-0.4, -0.6]])


def test_numbers_that_are_none_are_refused_and_an_empty_report_too() -> None:
    tokens = rescored(0.1)
    broken_T = tokens.trainer_T.copy()
    broken_T[7] = -np.inf
    with pytest.raises(RolloutError, match="trainer_T is -inf at token 7"):
        replace(tokens, trainer_T=broken_T)
    with pytest.raises(RolloutError, match="no tokens"):
        measure(tokens.of_version(99), TokenCounts())


def at_floor(mean: float, seed: int = 0) -> DivergenceReport:
    """|d| of a half-normal distribution with that mean."""
    return measure(rescored(mean * np.sqrt(np.pi / 2), seed), TokenCounts())


@pytest.mark.parametrize("seed", range(5))
def test_the_float32_floor_is_quiet_at_what_was_measured_and_rings_above(seed: int) -> None:
    assert alarms(at_floor(4e-6, seed), FLOORS["float32"]) == []
    assert [alarm.name for alarm in alarms(at_floor(4e-5, seed), FLOORS["float32"])] == ["mean |d log p|"]


def test_one_bad_token_rings_though_the_mean_is_fine() -> None:
    tokens = rescored(1e-7)
    tokens.trainer_T[5] += 2e-3
    (alarm,) = alarms(measure(tokens, TokenCounts()), FLOORS["float32"])
    assert alarm.name == "max |d log p|"
    assert "0.002" in alarm.text


def test_a_stale_cache_rings_in_bfloat16() -> None:
    assert alarms(at_floor(0.024), FLOORS["bfloat16"]) == []
    # Blocks of older weights were measured at a mean of 0.087.
    assert len(alarms(at_floor(0.087), FLOORS["bfloat16"])) == 2


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"k3": 1.1e-3}, "k3"),
        ({"mult_prob_error": 1.06}, "mult_prob_error"),
        ({"is_mean": 0.4}, "importance weight, mean"),
        ({"is_mean": 2.1}, "importance weight, mean"),
        ({"is_std": 1.1}, "importance weight, std"),
        ({"ess": 0.29}, "effective sample size"),
        ({"masked_fraction": 0.11}, "masked fraction"),
        ({"clipped_fraction": 0.11}, "clipped fraction"),
        ({"ess": float("nan")}, "effective sample size"),
    ],
)
def test_each_number_out_of_its_range_rings(changes: dict[str, float], name: str) -> None:
    healthy = at_floor(0.01)
    assert alarms(healthy, HEALTH) == []
    assert [alarm.name for alarm in alarms(structs.replace(healthy, **changes), HEALTH)] == [name]
