"""What the gate's error is over hundreds of looks, by simulation: requests of unequal length arrive one by one, each look
judges the newest of them under a new candidate, and its changes of AL are partly the request's, partly the candidate's."""

from __future__ import annotations

import numpy as np
import pytest

from learner.config import GateSettings
from learner.evaluate import Score
from learner.gain import paired_gain
from learner.looks import level_of_look

SETTINGS = GateSettings(num_resamples=200)


def first_success(
    seed: int, *, gain: float = 0.0, since: int = 0, num_looks: int = 180, spread: float = 0.15, skew: bool = False
) -> int | None:
    """The first look that takes a candidate for better; its true gain is `gain` after look `since`, 0 before, where only
    the looks are counted."""
    rng = np.random.default_rng(seed)
    requests: list[tuple[str, int, float]] = []
    own = np.zeros(0)
    for look in range(1, num_looks + 1):
        for _ in range(8 if look == 1 else rng.poisson(1.0)):
            of_request = 1.0 - rng.exponential() if skew else rng.normal()
            requests.append((f"k{len(requests)}.{look}", max(int(rng.lognormal(4.5, 0.6)), 8), of_request))
            own = np.append(own, rng.normal())
        requests, own = requests[-SETTINGS.max_requests :], own[-SETTINGS.max_requests :]
        own = 0.5 * own + np.sqrt(0.75) * rng.normal(size=len(own))
        if look <= since:
            continue
        before = {key: Score(key, 1.5 * length, length, key) for key, length, _ in requests}
        changes = gain + spread * np.sqrt(0.5) * (np.array([of_request for _, _, of_request in requests]) + own)
        after = {
            key: Score(key, (1.5 + change) * length, length, key)
            for (key, length, _), change in zip(requests, changes, strict=True)
        }
        if paired_gain(after, before, num_resamples=SETTINGS.num_resamples).low(level_of_look(look, SETTINGS)) > 0:
            return look
    return None


def test_levels_of_an_hour_add_up_to_the_stated_one():
    levels = [level_of_look(look, SETTINGS) for look in range(1, 361)]
    assert sum(levels[:180]) == pytest.approx(0.05, rel=0.01)
    assert sum(levels[180:]) == pytest.approx(0.025, rel=0.01)
    assert levels == sorted(levels, reverse=True)


def test_a_gate_that_rarely_looks_spends_no_more_than_it_has():
    assert level_of_look(1, GateSettings(every_s=1e6)) <= 0.05


@pytest.mark.parametrize(
    ("spread", "skew"), [(0.15, False), (0.15, True), (0.3, False)], ids=["usual", "few lose much", "wild"]
)
def test_candidates_that_are_not_better_stay_unpublished_over_an_hour_of_looks(spread, skew):
    """One incumbent in twenty may lose its place for nothing; looks at 5 % each cost 19 in 20 theirs."""
    num_false = sum(first_success(seed, spread=spread, skew=skew) is not None for seed in range(80))
    assert num_false / 80 < 0.10


def test_a_gain_that_is_there_from_the_start_is_seen_after_few_looks():
    looks = [first_success(seed, gain=0.1) or 999 for seed in range(40)]
    assert np.median(looks) <= 35
    assert np.quantile(looks, 0.9) <= 80


def test_a_gain_after_a_long_standstill_is_seen_as_well():
    looks = [(first_success(seed, gain=0.1, since=100, num_looks=180) or 999) - 100 for seed in range(40)]
    assert np.median(looks) <= 12
    assert np.quantile(looks, 0.9) <= 45
