"""Survival: what is known of a draft's acceptance, and how well."""

from __future__ import annotations

import pytest

from server.depth.survival import Survival, expected_tokens
from server.tally import Tally


def verified(num_steps: int, *shares: float) -> Tally:
    return Tally(num_steps, (num_steps,) * len(shares), tuple(round(num_steps * share) for share in shares))


def test_much_evidence_gives_the_measured_shares() -> None:
    survival = Survival(3)
    survival.observe(1, verified(10_000, 0.7, 0.5, 0.3), 0.0)
    shares = survival.shares(0.0)
    assert [share.mean for share in shares] == pytest.approx([0.7, 0.5, 0.3], abs=0.01)
    assert max(share.deviation for share in shares) < 0.03
    assert expected_tokens(shares, 2) == pytest.approx(2.2, abs=0.02)


def test_the_posterior_is_the_beta_distributions_where_steps_count_fully(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beta(a, b) has mean a / (a + b) and variance a b / ((a + b)^2 (a + b + 1))."""
    from server.depth import survival as module

    monkeypatch.setattr(module, "STEPS_ALIKE", 1.0)
    monkeypatch.setattr(module, "HALF_LIFE_STEPS", 1e9)
    survival = Survival(1)
    survival.observe(1, verified(40, 0.75), 0.0)
    a = 30 + module.ASSUMED_STEPS * module.FIRST_SHARE
    b = 10 + module.ASSUMED_STEPS * (1 - module.FIRST_SHARE)
    (share,) = survival.shares(0.0)
    assert share.mean == pytest.approx(a / (a + b))
    assert share.deviation**2 == pytest.approx(a * b / ((a + b) ** 2 * (a + b + 1)))


def test_a_position_that_is_not_proposed_follows_the_one_before_and_is_uncertain() -> None:
    survival = Survival(3)
    survival.observe(1, verified(2000, 0.6), 0.0)
    first, second, third = survival.shares(0.0)
    assert 0.2 < second.mean < first.mean
    assert third.mean < second.mean
    assert second.deviation > 5 * first.deviation


def test_a_rejected_position_leaves_nothing_to_hope_for_beyond() -> None:
    survival = Survival(3)
    survival.observe(1, verified(2000, 0.0), 0.0)
    assert all(share.mean + 2 * share.deviation < 0.02 for share in survival.shares(0.0))


def test_a_new_draft_may_be_anything_until_it_is_seen() -> None:
    survival = Survival(2)
    survival.observe(1, verified(2000, 0.0, 0.0), 0.0)
    survival.observe(2, Tally(), 1.0)
    share = survival.shares(1.0)[0]
    assert share.mean + 2 * share.deviation > 0.4
    survival.observe(2, verified(200, 0.8, 0.6), 2.0)
    assert survival.shares(2.0)[0].mean > 0.75


def test_a_draft_may_be_anything_under_another_target_and_is_seen_again() -> None:
    survival = Survival(2)
    survival.observe(1, verified(2000, 0.0, 0.0), 0.0)
    survival.forget()
    share = survival.shares(1.0)[0]
    assert share.mean + 2 * share.deviation > 0.4
    survival.observe(1, verified(200, 0.8, 0.6), 2.0)
    assert survival.shares(2.0)[0].mean > 0.75


def test_what_was_not_verified_for_long_grows_uncertain() -> None:
    survival = Survival(1)
    survival.observe(1, verified(2000, 0.0), 0.0)
    deviations = [survival.shares(now_s)[0].deviation for now_s in (0.0, 60.0, 600.0)]
    assert deviations == sorted(deviations)
    assert deviations[-1] > 0.1


def test_recent_steps_outweigh_old_ones() -> None:
    survival = Survival(1)
    survival.observe(1, verified(100_000, 0.9), 0.0)
    for second in range(1, 61):
        survival.observe(1, verified(100, 0.1), float(second))
    assert survival.shares(60.0)[0].mean < 0.2
