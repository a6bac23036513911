from __future__ import annotations

import random
from dataclasses import replace

import pytest

from learner.config import GateSettings
from learner.evaluate import Score, simulated_al
from learner.gate import SMALL_DOMAINS, AnchorScores, decide, worst_domain
from learner.wager import Wager
from wire.artifact import GateReport

SETTINGS = GateSettings()


def wager(changes: list[float]) -> Wager:
    made = Wager(0.05)
    for change in changes:
        made.count(change, 100)
    return made


SURE, UNSURE = wager([0.5] * 20), wager([0.1, -0.1] * 3)


def scores(lengths: list[float], prefix: str = "k") -> dict[str, Score]:
    keys = [f"{prefix}{n}" for n in range(len(lengths))]
    return {key: Score(key, length * 10, 10, key) for key, length in zip(keys, lengths, strict=True)}


def anchors(domain: str, after: list[float], before: list[float]) -> AnchorScores:
    return AnchorScores(domain, scores(after, domain), scores(before, domain))


def verdict(after: list[float], before: list[float], domains: list[AnchorScores] | None = None) -> GateReport:
    return decide(SURE, scores(after), scores(before), lambda: domains or [], SETTINGS)


def test_a_clear_gain_is_accepted():
    report = verdict([1.8, 1.6, 1.7, 1.9], [1.2, 1.1, 1.3, 1.2])
    assert report.accepted
    assert report.candidate_al == pytest.approx(1.75)
    assert 0 < report.gain_low < 0.55 < report.gain_high
    assert report.evidence == pytest.approx(report.evidence_needed)
    assert (report.num_counted, report.counted_gain) == (20, pytest.approx(0.5))


def test_a_gain_on_the_newest_requests_is_not_enough_without_evidence():
    report = decide(UNSURE, scores([1.8] * 8), scores([1.2] * 8), lambda: [], SETTINGS)
    assert not report.accepted
    assert report.reason.startswith("gain of +0.000 AL on 6 requests is not sure yet: evidence ")
    assert report.reason.endswith(" of the 40 needed")
    assert report.evidence < report.evidence_needed == pytest.approx(40)


@pytest.mark.parametrize("length", [1.3, 1.5, 1.51])
def test_weights_that_do_no_better_on_the_newest_requests_stay_out_whatever_earlier_ones_did(length):
    report = verdict([length] * 20, [1.5] * 20)
    assert not report.accepted
    assert "on the 20 newest requests is below the 0.02" in report.reason


def test_both_als_are_of_the_same_requests():
    after, before = scores([1.8] * 4), scores([1.2] * 4 + [3.0] * 8)
    report = decide(SURE, after, before, lambda: [], SETTINGS)
    assert (report.candidate_al, report.incumbent_al, report.num_requests) == (pytest.approx(1.8), pytest.approx(1.2), 4)


def test_too_few_requests_are_rejected():
    report = verdict([2.0] * 3, [1.0] * 3)
    assert "only 3 unseen requests" in report.reason


def test_one_suffering_domain_vetoes():
    domains = [anchors("t/chat", [1.5] * 4, [2.0] * 4), anchors("t/code", [1.9] * 4, [1.5] * 4)]
    report = verdict([2.0] * 8, [1.5] * 8, domains)
    assert not report.accepted
    assert report.worst_anchor_domain == "t/chat"
    assert report.worst_anchor_change == pytest.approx(-0.5)


def test_a_domain_that_loses_for_certain_vetoes_beside_one_that_seems_to_lose_more():
    noisy, sure = anchors("t/a", [0.4, 2.6, 0.6, 2.0], [2.0] * 4), anchors("t/b", [1.5] * 4, [2.0] * 4)
    report = verdict([2.0] * 8, [1.5] * 8, [noisy, sure, anchors("t/c", [2.1] * 4, [2.0] * 4)])
    assert not report.accepted
    assert report.worst_anchor_domain == "t/b"


def test_a_loss_that_may_be_chance_is_no_veto():
    noisy = anchors("t/chat", [1.4, 2.3, 1.5, 2.4, 1.8, 2.1], [2.0] * 6)
    report = verdict([2.0] * 8, [1.5] * 8, [noisy])
    assert report.accepted
    assert report.worst_anchor_change == pytest.approx(-0.5 / 6)


def test_domains_of_too_few_requests_are_judged_together():
    losing = [anchors(f"t/{n}", [1.0 + n / 100], [2.0]) for n in range(10)]
    report = verdict([2.0] * 8, [1.5] * 8, losing)
    assert not report.accepted
    assert report.worst_anchor_domain == SMALL_DOMAINS
    assert report.worst_anchor_change == pytest.approx(-0.955)


def test_too_few_anchors_in_all_have_no_veto():
    report = verdict([2.0] * 8, [1.5] * 8, [anchors(f"t/{n}", [1.0], [2.0]) for n in range(3)])
    assert report.accepted
    assert report.worst_anchor_domain is None


@pytest.mark.parametrize(("evidence", "length"), [(UNSURE, 2.0), (SURE, 1.5)])
def test_anchors_are_not_asked_where_the_requests_speak_against_the_candidate(evidence, length):
    def unwanted() -> list[AnchorScores]:
        raise AssertionError

    assert not decide(evidence, scores([length] * 8), scores([1.5] * 8), unwanted, SETTINGS).accepted


def changed_domains(rng: random.Random, *, sizes: list[int], spread: float, change: float = 0.0) -> list[AnchorScores]:
    """Domains whose requests change by `change` AL on average; of unequal length, the changes spread about that."""
    domains = []
    for number, size in enumerate(sizes):
        after, before = {}, {}
        for n in range(size):
            key, num_anchors = f"{number}.{n}", max(int(rng.lognormvariate(4.5, 0.6)), 8)
            before[key] = Score(key, 2.0 * num_anchors, num_anchors, key)
            after[key] = Score(key, (2.0 + rng.gauss(change, spread)) * num_anchors, num_anchors, key)
        domains.append(AnchorScores(f"t/{number}", after, before))
    return domains


@pytest.mark.parametrize("spread", [0.15, 0.3])
@pytest.mark.parametrize("sizes", [[8] * 9, [4] * 9, [8, 8, 1, 2, 2, 1, 3, 1, 2]], ids=["eights", "fours", "mostly small"])
def test_domains_that_lose_nothing_rarely_veto(sizes, spread):
    """At most one look in twenty. A percentile bootstrap vetoes one in three of the first kind."""
    rng, settings = random.Random(2), GateSettings(num_resamples=200)
    vetoes = 0
    for _ in range(400):
        worst = worst_domain(changed_domains(rng, sizes=sizes, spread=spread), settings)
        vetoes += worst is not None and worst.is_certain_loss
    assert vetoes / 400 < 0.07


def test_one_domain_of_nine_that_loses_much_vetoes():
    rng, settings = random.Random(3), GateSettings(num_resamples=200)
    vetoes = 0
    for _ in range(100):
        domains = changed_domains(rng, sizes=[8] * 8, spread=0.15)
        (loser,) = changed_domains(rng, sizes=[8], spread=0.15, change=-0.4)
        worst = worst_domain([*domains, replace(loser, domain="t/loser")], settings)
        vetoes += worst is not None and worst.is_certain_loss and worst.domain == "t/loser"
    assert vetoes / 100 > 0.85


def test_without_anchors_there_is_no_worst_domain():
    assert worst_domain([], SETTINGS) is None


def test_al_without_a_request_is_that_of_no_draft():
    assert simulated_al([]) == 1.0
