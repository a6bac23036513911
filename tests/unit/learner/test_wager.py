"""What the gate's error and its power are, by simulation: requests of unequal length arrive one by one and are counted once,
with changes of AL that spread as those of real drafts do; a look is taken at every eight of them, 20 s of traffic."""

from __future__ import annotations

from math import log, prod

import msgspec
import numpy as np
import pytest

from learner.wager import CLIP, Wager

LEVEL = 0.05
PER_LOOK = 8
TWO_HOURS = 360
NEVER = 999


def looks_until_won(
    seed: int,
    gain: float,
    *,
    num_looks: int = TWO_HOURS,
    spread: float = 0.3,
    skew: bool = False,
    before: tuple[int, float] = (0, 0.0),
) -> int:
    """Looks until the wager is won, NEVER within `num_looks`; `before` tells how many looks there were with which gain before."""
    rng = np.random.default_rng(seed)
    wager = Wager(LEVEL)
    num_before, gain_before = before
    for look in range(1, num_before + num_looks + 1):
        for _ in range(PER_LOOK):
            chance = 1.0 - rng.exponential() if skew else rng.normal()
            mean = gain if look > num_before else gain_before
            wager.count(mean + spread * chance, max(int(rng.lognormal(4.5, 0.6)), 8))
        if wager.is_won:
            return look - num_before
    return NEVER


def hopeful() -> Wager:
    """A few requests have spoken for the draft, so that as much as may be is bet on the next."""
    wager = Wager(LEVEL)
    for _ in range(4):
        wager.count(0.3, 100)
    return wager


@pytest.mark.parametrize(
    ("spread", "skew"),
    [(0.15, False), (0.15, True), (0.3, False), (0.3, True)],
    ids=["usual", "few lose much", "wild", "wild losses"],
)
def test_drafts_that_are_not_better_stay_unpublished_over_two_hours_of_looks(spread, skew):
    num_false = sum(looks_until_won(seed, 0.0, spread=spread, skew=skew) < NEVER for seed in range(40))
    assert num_false <= 2


@pytest.mark.parametrize(("gain", "median", "most"), [(0.05, 75, 240), (0.1, 14, 27), (0.15, 9, 14), (0.3, 4, 6), (0.6, 2, 3)])
def test_a_gain_that_is_there_from_the_start_is_sure_after_few_looks(gain, median, most):
    looks = [looks_until_won(seed, gain) for seed in range(20)]
    assert np.median(looks) <= median
    assert np.quantile(looks, 0.9) <= most


@pytest.mark.parametrize("gain_before", [0.0, -0.3], ids=["a standstill", "losses in another domain"])
@pytest.mark.parametrize(("gain", "median", "most"), [(0.1, 25, 45), (0.15, 14, 24), (0.3, 7, 10)])
def test_a_gain_after_a_shift_is_seen_soon_whatever_was_before(gain, median, most, gain_before):
    looks = [looks_until_won(seed, gain, before=(40, gain_before)) for seed in range(20)]
    assert min(looks) > 0
    assert np.median(looks) <= median
    assert np.quantile(looks, 0.9) <= most


def test_what_was_won_is_lost_again_to_a_few_requests_that_lose():
    """Old evidence, however much there is, must not speak for a draft that is worse on what is asked now."""
    wager = Wager(LEVEL)
    for _ in range(500):
        wager.count(0.4, 100)
    assert wager.is_won
    wager.count(-0.3, 100)
    assert not wager.is_won
    for _ in range(3):
        wager.count(-0.3, 100)
    assert wager.evidence < wager.needed / 3


def test_the_wealth_is_the_product_of_bets_that_are_made_before_each_request():
    changes = np.random.default_rng(0).normal(0.02, 0.2, size=6)
    wager, factors = Wager(1e-6), []
    for change in changes:
        bet = min(wager.mean / wager.mean_square, 0.9 / CLIP)
        factors.append(1.0 + bet * change)
        wager.count(float(change), 100)
    assert wager.evidence == pytest.approx(prod(factors))


def test_no_bet_can_lose_everything_and_a_larger_change_counts_as_the_largest():
    wealth = log(20.0)
    one, other = (msgspec.structs.replace(hopeful(), log_wealth=wealth) for _ in range(2))
    one.count(-CLIP, 100)
    other.count(-7.0, 100)
    assert one.log_wealth == other.log_wealth == pytest.approx(wealth + log(0.1))


def test_a_short_request_counts_for_less():
    short, long = hopeful(), hopeful()
    short.count(0.3, 4)
    long.count(0.3, 400)
    assert hopeful().log_wealth < short.log_wealth < long.log_wealth
    assert short.gain == long.gain == pytest.approx(0.3)


def test_where_most_is_lost_the_stake_is_replaced_and_more_is_needed():
    wager = hopeful()
    needed = wager.needed
    wager.count(-CLIP, 100)
    assert (wager.stake, wager.log_wealth) == (2, 0.0)
    assert wager.needed == pytest.approx(3 * needed)


@pytest.mark.parametrize(
    ("changes", "chances"),
    [((0.8, -0.8), (0.5, 0.5)), ((0.4, -0.8), (2 / 3, 1 / 3)), ((1.0, -0.25), (0.2, 0.8))],
    ids=["even", "gains often, loses much", "gains seldom, loses little"],
)
def test_the_chance_of_winning_without_a_gain_is_at_most_the_level_over_all_courses_there_can_be(changes, chances):
    """Exact: every course of 13 requests whose change is 0 on average, at a level at which many of them come near."""
    assert sum(change * chance for change, chance in zip(changes, chances, strict=True)) == pytest.approx(0.0)

    def chance_of_winning(wager: Wager, num_left: int) -> float:
        if wager.is_won or num_left == 0:
            return float(wager.is_won)
        total = 0.0
        for change, chance in zip(changes, chances, strict=True):
            after = msgspec.structs.replace(wager)
            after.count(change, 100)
            total += chance * chance_of_winning(after, num_left - 1)
        return total

    level = 0.5
    assert 0.01 < chance_of_winning(Wager(level), 13) <= level


@pytest.mark.parametrize(("gain", "loss"), [(0.3, 0.3), (0.2, 0.8), (1.0, 0.25)])
def test_no_request_without_a_gain_is_expected_to_raise_the_wealth(gain, loss):
    """A supermartingale, whatever was before: also where the wealth is cut at what is needed."""
    rng = np.random.default_rng(1)
    chance = loss / (gain + loss)
    for _ in range(200):
        before = Wager(LEVEL)
        for change in rng.normal(0.1, 0.3, size=rng.integers(0, 40)):
            before.count(float(change), 100)
        after = [msgspec.structs.replace(before) for _ in range(2)]
        after[0].count(gain, 100)
        after[1].count(-loss, 100)
        if after[1].stake == before.stake:
            assert chance * after[0].evidence + (1 - chance) * after[1].evidence <= before.evidence * (1 + 1e-12)


def test_stakes_share_the_level():
    levels = [1 / Wager(LEVEL, stake=stake).needed for stake in range(1, 2000)]
    assert levels[0] == pytest.approx(LEVEL / 2)
    assert sum(levels) == pytest.approx(LEVEL, rel=1e-3)
    assert levels == sorted(levels, reverse=True)


def test_a_wager_goes_through_a_file():
    wager = Wager(LEVEL)
    for change in (0.3, -0.2, 0.1):
        wager.count(change, 50)
    again = msgspec.json.decode(msgspec.json.encode(wager), type=Wager)
    assert again == wager
    assert again.log_wealth < log(again.needed)
