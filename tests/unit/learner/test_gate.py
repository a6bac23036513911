from __future__ import annotations

import random

import pytest

from learner.config import GateSettings
from learner.evaluate import Score, simulated_al
from learner.gate import AnchorScores, decide, paired_gain, worst_anchor

SETTINGS = GateSettings()


def scores(lengths: list[float]) -> dict[str, Score]:
    return {f"k{n}": Score(f"k{n}", length * 10, 10) for n, length in enumerate(lengths)}


def anchors(domain: str, after: list[float], before: list[float]) -> AnchorScores:
    return AnchorScores(domain, scores(after), scores(before))


def test_a_clear_gain_is_accepted():
    report = decide(scores([1.8, 1.6, 1.7, 1.9]), scores([1.2, 1.1, 1.3, 1.2]), [], SETTINGS)
    assert report.accepted
    assert report.candidate_al == pytest.approx(1.75)
    assert 0 < report.gain_low < 0.55 < report.gain_high


def test_noise_is_rejected():
    report = decide(scores([1.5 + change for change in (0.3, -0.2, 0.2, -0.2) * 5]), scores([1.5] * 20), [], SETTINGS)
    assert not report.accepted
    assert "not significant" in report.reason


def test_a_certain_but_tiny_gain_is_rejected():
    report = decide(scores([1.51] * 8), scores([1.5] * 8), [], SETTINGS)
    assert "below the 0.02" in report.reason


def test_too_few_requests_are_rejected():
    report = decide(scores([2.0] * 3), scores([1.0] * 3), [], SETTINGS)
    assert "only 3 held-out requests" in report.reason


def test_one_suffering_domain_vetoes():
    domains = [anchors("t/chat", [1.9] * 4, [2.0] * 4), anchors("t/code", [1.9] * 4, [1.5] * 4)]
    report = decide(scores([2.0] * 8), scores([1.5] * 8), domains, SETTINGS)
    assert not report.accepted
    assert report.worst_anchor_domain == "t/chat"
    assert report.worst_anchor_change == pytest.approx(-0.1)


def test_a_domain_that_loses_for_certain_vetoes_beside_one_that_seems_to_lose_more():
    noisy, sure = anchors("t/a", [1.0, 2.6, 1.2, 2.0], [2.0] * 4), anchors("t/b", [1.8] * 4, [2.0] * 4)
    report = decide(scores([2.0] * 8), scores([1.5] * 8), [noisy, sure], SETTINGS)
    assert not report.accepted
    assert report.worst_anchor_domain == "t/b"


def test_a_loss_that_may_be_chance_is_no_veto():
    noisy = anchors("t/chat", [1.4, 2.3, 1.5, 2.4, 1.8, 2.1], [2.0] * 6)
    report = decide(scores([2.0] * 8), scores([1.5] * 8), [noisy], SETTINGS)
    assert report.accepted
    assert report.worst_anchor_change == pytest.approx(-0.5 / 6)


def test_domains_of_too_few_requests_have_no_veto():
    few = [anchors(f"t/{n}", [1.0], [2.0]) for n in range(100)]
    report = decide(scores([2.0] * 8), scores([1.5] * 8), few, SETTINGS)
    assert report.accepted
    assert report.worst_anchor_domain is None


def test_many_noisy_domains_do_not_stall_the_gate():
    """None of them changes in truth. A bare minimum over their means would veto 19 times in 20."""
    rng = random.Random(2)
    vetoes = 0
    for _ in range(100):
        domains = [anchors(f"t/{n}", [rng.gauss(2.0, 0.3) for _ in range(8)], [2.0] * 8) for n in range(8)]
        vetoes += not decide(scores([2.0] * 8), scores([1.5] * 8), domains, GateSettings(num_resamples=1000)).accepted
    assert vetoes / 100 < 0.45


def test_worst_anchor_without_anchors_is_nobody():
    assert worst_anchor([], SETTINGS)[0] is None


def test_bootstrap_is_paired_and_weighs_by_anchors():
    before = {f"k{n}": Score(f"k{n}", (1 + n) * 10.0, 10) for n in range(6)}
    after = {key: Score(key, score.total_length + 1.0, 10) for key, score in before.items()}
    gain = paired_gain(after, before, confidence=0.95, num_resamples=500)
    assert gain.low == pytest.approx(0.1)
    assert gain.high == pytest.approx(0.1)


def test_requests_scored_under_one_draft_only_do_not_count():
    gain = paired_gain({"a": Score("a", 20.0, 10)}, {"b": Score("b", 10.0, 10)}, confidence=0.95, num_resamples=100)
    assert (gain.num_requests, gain.mean) == (0, 0.0)


def test_false_acceptance_is_near_the_stated_level():
    rng = random.Random(1)
    accepted = 0
    for _ in range(200):
        before = scores([rng.gauss(1.5, 0.3) for _ in range(24)])
        after = {key: Score(key, score.total_length + rng.gauss(0, 2.0), 10) for key, score in before.items()}
        accepted += decide(after, before, [], GateSettings(min_gain=0.0, num_resamples=400)).accepted
    assert accepted / 200 < 0.11


def test_al_without_a_request_is_that_of_no_draft():
    assert simulated_al([]) == 1.0
