"""The canary's decision on numbers alone."""

from __future__ import annotations

import numpy as np
import pytest
from alike_requests import Requests, tally

from server.acceptance import BATCHES_PER_WINDOW, Window
from server.tally import Tally
from server.verdict import judge, measure_design_effect, variance_of_mean


def verdict(candidate: dict[str, Tally], baseline: dict[str, Tally]):  # type: ignore[no-untyped-def]
    return judge(candidate, baseline, min_verify_steps=200, max_relative_drop=0.10, design_effect=1.0)


def test_equal_or_better_passes() -> None:
    baseline = {"code": tally(2000, 1000, 500, 250)}
    assert verdict({"code": tally(200, 100, 50, 25)}, baseline).outcome == "pass"
    better = verdict({"code": tally(200, 160, 120, 80)}, baseline)
    assert (better.outcome, better.candidate_al, better.baseline_al) == ("pass", 2.8, 1.875)


def test_clear_drop_rolls_back() -> None:
    result = verdict({"code": tally(400, 0, 0, 0)}, {"code": tally(2000, 1400, 800, 400)})
    assert (result.outcome, result.candidate_al, result.baseline_al) == ("roll_back", 1.0, 2.3)
    assert "1.000 against 2.300" in result.reason


def test_too_few_steps_wait() -> None:
    assert verdict({"code": tally(199, 0)}, {"code": tally(2000, 1000)}).outcome == "wait"
    assert verdict({}, {"code": tally(2000, 1000)}).outcome == "wait"


def test_domains_without_a_baseline_do_not_count() -> None:
    baseline = {"code": tally(2000, 1000), "chat": tally(19, 10)}
    result = verdict({"code": tally(150, 80), "chat": tally(500, 0), "new": tally(500, 0)}, baseline)
    assert (result.outcome, result.num_verify_steps) == ("wait", 150)


def test_small_drop_within_the_setting_passes() -> None:
    assert verdict({"code": tally(5000, 2000)}, {"code": tally(5000, 2500)}).outcome == "pass"


def test_drop_beyond_the_setting_but_within_noise_waits() -> None:
    baseline = {"code": tally(25, 18, 12, 8)}
    result = verdict({"code": tally(200, 100, 60, 30)}, baseline)
    assert result.candidate_al is not None
    assert result.baseline_al is not None
    assert result.baseline_al - result.candidate_al > 0.1 * result.baseline_al
    assert result.outcome == "wait"
    assert verdict({"code": tally(200, 100, 60, 30)}, {"code": tally(2500, 1800, 1200, 800)}).outcome == "roll_back"


def test_shift_of_traffic_to_a_hard_domain_is_no_regression() -> None:
    baseline = {"easy": tally(1900, 1900, 1900), "hard": tally(100, 10, 0)}
    shifted = {"easy": tally(20, 20, 20), "hard": tally(380, 38, 0)}
    assert verdict(shifted, baseline).outcome == "pass"


def test_other_depth_is_no_regression() -> None:
    baseline = {"code": Tally(1000, (1000, 1000, 1000), (700, 500, 300))}
    shallow = {"code": Tally(1000, (1000,), (700,))}
    assert verdict(shallow, baseline).outcome == "pass"
    off_by_load = {"code": Tally(1000, (1000, 500, 500), (700, 250, 150))}
    assert verdict(off_by_load, baseline).outcome == "pass"


def test_a_drop_within_the_noise_of_requests_that_are_alike_waits() -> None:
    numbers = {"code": tally(200, 100, 60, 30)}, {"code": tally(2500, 1800, 1200, 800)}
    outcomes = [
        judge(*numbers, min_verify_steps=200, max_relative_drop=0.10, design_effect=effect).outcome for effect in (1.0, 40.0)
    ]
    assert outcomes == ["roll_back", "wait"]


def test_the_design_effect_of_nothing_is_the_prior_and_of_equal_batches_less() -> None:
    assert measure_design_effect([]) == measure_design_effect([[tally(200, 100)]]) == pytest.approx(4.0)
    assert measure_design_effect([[tally(200, 100)] * 10]) == pytest.approx(4 * 4 / 13)


def mostly_shallow(rng: np.random.Generator, num_deep: int, rate: float = 0.6) -> Tally:
    """2,000 steps of which so many proposed three tokens and the others one."""
    first = rng.binomial(num_deep, rate)
    second = rng.binomial(first, rate)
    accepted = (first + rng.binomial(2000 - num_deep, rate), second, rng.binomial(second, rate))
    return Tally(2000, (2000, num_deep, num_deep), tuple(map(int, accepted)))


@pytest.mark.parametrize("num_deep", [2000, 200, 40, 5])
def test_positions_that_were_seldom_proposed_are_as_uncertain_as_they_are(num_deep: int) -> None:
    """Depth differs by batch size, so deep positions may have few proposals. Four sigmas of equal drafts are next to never."""
    rng = np.random.default_rng(num_deep)
    outcomes = [
        judge(
            {"d": mostly_shallow(rng, num_deep)},
            {"d": mostly_shallow(rng, 2000)},
            min_verify_steps=200,
            max_relative_drop=0.03,
            design_effect=1.0,
            num_sigmas=4.0,
        ).outcome
        for _ in range(500)
    ]
    assert outcomes.count("roll_back") == 0


@pytest.mark.parametrize("num_deep", [2000, 200, 40])
def test_the_variance_is_that_of_means_over_steps_of_several_depths(num_deep: int) -> None:
    rng = np.random.default_rng(num_deep)
    drawn = [mostly_shallow(rng, num_deep) for _ in range(2000)]
    expected = np.var([sum(one.rates()) for one in drawn])
    assert variance_of_mean([0.6, 0.36, 0.216], drawn[0].proposed) == pytest.approx(expected, rel=0.15)
    equal = Tally(2000, (2000, 2000, 2000), (1200, 720, 432))
    square = 1200 + 3 * 720 + 5 * 432  # of L: E[L^2] = sum (2i + 1) P(L > i)
    assert variance_of_mean(equal.rates(), equal.proposed) == pytest.approx((square / 2000 - 1.176**2) / 2000)


def test_the_design_effect_grows_with_the_spread_of_batches() -> None:
    """Batches of 200 steps that accept 100, give or take 30: 18 times the variance of independent steps."""
    batches = [tally(200, 130), tally(200, 70)] * 5
    assert measure_design_effect([batches]) == pytest.approx((16 + 10 * 200 * 0.15**2 / 0.25) / 13)


def watch(seed: int, acceptance: float) -> str:
    """How a canary ends over a draft of that acceptance, after one of 0.45."""
    rng = np.random.default_rng(seed)
    baseline, candidate = Window(2000), Tally()
    before, after = Requests(rng, 0.45), Requests(rng, acceptance)
    for _ in range(100):
        baseline.add(before.second())
    effect = measure_design_effect([baseline.batches])
    for _ in range(300):
        candidate += after.second()
        result = judge(
            {"d": candidate}, {"d": baseline.tally}, min_verify_steps=200, max_relative_drop=0.1, design_effect=effect
        )
        if result.outcome != "wait":
            return result.outcome
    return "undecided"


def test_a_draft_that_is_as_good_is_seldom_rolled_back_and_a_bad_one_mostly() -> None:
    """Three sigmas of independent steps would roll back one equal draft in eight."""
    assert sum(watch(seed, 0.45) == "roll_back" for seed in range(150)) / 150 < 0.06
    assert sum(watch(seed, 0.25) == "roll_back" for seed in range(50)) / 50 > 0.85


def test_a_change_of_depth_within_a_window_is_no_spread_of_its_batches() -> None:
    deep, shallow = tally(100, 50, 25, 12), Tally(100, (100, 0, 0), (50, 0, 0))
    assert measure_design_effect([[deep, shallow] * 5]) == measure_design_effect([[tally(100, 50)] * 10])


def test_a_window_is_kept_in_batches_of_a_tenth() -> None:
    window = Window(1000)
    for _ in range(300):
        window.add(tally(9, 5))
    assert 1000 <= window.tally.num_verify_steps < 1000 + 2 * 108
    assert all(batch.num_verify_steps == 108 for batch in window.batches)
    assert len(window.batches) >= BATCHES_PER_WINDOW - 1
