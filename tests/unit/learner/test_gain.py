from __future__ import annotations

from math import gamma, pi, sqrt

import numpy as np
import pytest

from learner.evaluate import Score
from learner.gain import COMMON_SPREAD_AL, NO_EVIDENCE, paired_gain, student_quantile


def tail_reference(value: float, num_freedom: float) -> float:
    """P(t > value), by summing the density."""
    density = gamma((num_freedom + 1) / 2) / (sqrt(num_freedom * pi) * gamma(num_freedom / 2))
    angles = np.linspace(np.arctan(value / sqrt(num_freedom)), pi / 2, 200_001)
    middles = (angles[1:] + angles[:-1]) / 2
    return float(density * sqrt(num_freedom) * (np.cos(middles) ** (num_freedom - 1)).sum() * (angles[1] - angles[0]))


@pytest.mark.parametrize("num_freedom", [3.0, 7.0, 12.5, 31.0])
@pytest.mark.parametrize("level", [0.05, 0.0125, 1e-3, 1e-4])
def test_student_quantile_agrees_with_the_integral_and_errs_on_the_careful_side(level, num_freedom):
    assert 0.5 * level < tail_reference(student_quantile(level, num_freedom), num_freedom) <= 1.01 * level


def test_the_gain_is_paired_and_weighs_by_anchors():
    before = {f"k{n}": Score(f"k{n}", (1 + n) * 10.0, 10, f"p{n}") for n in range(6)}
    after = {key: Score(key, score.total_length + 1.0, 10, score.prompt_key) for key, score in before.items()}
    gain = paired_gain(after, before, num_resamples=500)
    assert gain.mean == pytest.approx(0.1)
    assert gain.num_freedom == pytest.approx(4 + 5)
    assert gain.std_error == pytest.approx(sqrt(4 * COMMON_SPREAD_AL**2 / 6 / 9))


def test_requests_scored_under_one_draft_only_do_not_count():
    gain = paired_gain({"a": Score("a", 20.0, 10, "a")}, {"b": Score("b", 10.0, 10, "b")}, num_resamples=100)
    assert gain == NO_EVIDENCE
    assert gain.low(0.05) < 0


def test_the_standard_error_is_that_of_a_mean_with_a_prior_worth_four_requests():
    changes = np.random.default_rng(0).normal(0.1, 0.5, size=20)
    before = {f"k{n}": Score(f"k{n}", 15.0, 10, f"p{n}") for n in range(20)}
    after = {f"k{n}": Score(f"k{n}", 15.0 + 10 * change, 10, f"p{n}") for n, change in enumerate(changes)}
    gain = paired_gain(after, before, num_resamples=20_000)
    moderated = (4 * COMMON_SPREAD_AL**2 + 19 * changes.var(ddof=1)) / 23
    assert gain.std_error == pytest.approx(sqrt(moderated / 20), rel=0.02)


def test_a_gain_as_large_as_it_can_be_is_sure_with_four_requests_however_often_was_looked():
    before = {f"k{n}": Score(f"k{n}", 10.0, 10, f"p{n}") for n in range(4)}
    after = {f"k{n}": Score(f"k{n}", 34.0 + n, 10, f"p{n}") for n in range(4)}
    assert paired_gain(after, before, num_resamples=500).low(1e-6) > 0


def test_the_same_prompt_again_is_no_new_evidence():
    def scores(length: float, copies: int) -> dict[str, Score]:
        changes = (0.4, -0.1, 0.3, 0.1)
        return {
            f"{n}.{copy}": Score(f"{n}.{copy}", 10 * (1.5 + length * change), 10, f"p{n}")
            for n, change in enumerate(changes)
            for copy in range(copies)
        }

    once, often = (paired_gain(scores(1.0, copies), scores(0.0, copies), num_resamples=2000) for copies in (1, 8))
    assert often.num_requests == 8 * once.num_requests
    assert often.low(0.05) == pytest.approx(once.low(0.05))


def test_one_long_request_does_not_pass_for_many():
    lengths = [2000] + [10] * 9
    before = {f"k{n}": Score(f"k{n}", 1.5 * length, length, f"p{n}") for n, length in enumerate(lengths)}
    after = {
        key: Score(key, score.total_length + 0.5 * score.num_anchors, score.num_anchors, key) for key, score in before.items()
    }
    gain = paired_gain(after, before, num_resamples=2000)
    assert gain.mean == pytest.approx(0.5)
    assert gain.num_freedom < 4.2
    assert gain.low(0.01) < 0
