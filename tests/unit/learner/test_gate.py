from __future__ import annotations

import random

import pytest

from learner.config import GateSettings
from learner.evaluate import Score, simulated_al
from learner.gate import decide, paired_gain, worst_anchor

SETTINGS = GateSettings()


def scores(lengths: list[float], group: str = "t/code") -> list[Score]:
    return [Score(f"{group}{n}", group, length * 10, 10) for n, length in enumerate(lengths)]


def test_a_clear_gain_is_accepted():
    report = decide(scores([1.8, 1.6, 1.7, 1.9]), scores([1.2, 1.1, 1.3, 1.2]), [], [], SETTINGS)
    assert report.accepted
    assert report.candidate_al == pytest.approx(1.75)
    assert 0 < report.gain_low < 0.55 < report.gain_high


def test_noise_is_rejected():
    report = decide(scores([1.5 + change for change in (0.3, -0.2, 0.2, -0.2) * 5]), scores([1.5] * 20), [], [], SETTINGS)
    assert not report.accepted
    assert "not significant" in report.reason


def test_a_certain_but_tiny_gain_is_rejected():
    report = decide(scores([1.51] * 8), scores([1.5] * 8), [], [], SETTINGS)
    assert "below the 0.02" in report.reason


def test_too_few_requests_are_rejected():
    report = decide(scores([2.0] * 3), scores([1.0] * 3), [], [], SETTINGS)
    assert "only 3 held-out requests" in report.reason


def test_one_suffering_domain_vetoes():
    anchors_before = scores([2.0, 2.0], "t/chat") + scores([1.5], "t/code")
    anchors_after = scores([1.9, 1.9], "t/chat") + scores([1.9], "t/code")
    report = decide(scores([2.0] * 8), scores([1.5] * 8), anchors_after, anchors_before, SETTINGS)
    assert not report.accepted
    assert report.worst_anchor_domain == "t/chat"
    assert report.worst_anchor_change == pytest.approx(-0.1)


def test_worst_anchor_without_anchors_is_nobody():
    assert worst_anchor([], []) == (None, 0.0)


def test_bootstrap_is_paired_and_weighs_by_anchors():
    before = {f"k{n}": Score(f"k{n}", "g", (1 + n) * 10.0, 10) for n in range(6)}
    after = {key: Score(key, "g", score.total_length + 1.0, 10) for key, score in before.items()}
    gain = paired_gain(after, before, confidence=0.95, num_resamples=500)
    assert gain.low == pytest.approx(0.1)
    assert gain.high == pytest.approx(0.1)


def test_requests_scored_under_one_draft_only_do_not_count():
    gain = paired_gain({"a": scores([2.0])[0]}, {"b": scores([1.0])[0]}, confidence=0.95, num_resamples=100)
    assert (gain.num_requests, gain.mean) == (0, 0.0)


def test_false_acceptance_is_near_the_stated_level():
    rng = random.Random(1)
    accepted = 0
    for _ in range(200):
        before = scores([rng.gauss(1.5, 0.3) for _ in range(24)])
        after = [Score(s.key, s.group, s.total_length + rng.gauss(0, 2.0), 10) for s in before]
        accepted += decide(after, before, [], [], GateSettings(min_gain=0.0, num_resamples=400)).accepted
    assert accepted / 200 < 0.11


def test_al_without_a_request_is_that_of_no_draft():
    assert simulated_al([]) == 1.0
