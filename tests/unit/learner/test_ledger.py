from __future__ import annotations

from dataclasses import replace

import pytest

from learner.evaluate import Score
from learner.ledger import Ledger
from learner.request import CapturedRequest
from learner.wager import Wager


def scores(requests: list[CapturedRequest], length: float) -> dict[str, Score]:
    return {request.key: Score(request.key, 20 * length, 20, request.prompt_key) for request in requests}


@pytest.fixture
def requests(make_request) -> list[CapturedRequest]:
    return [make_request(f"k{n}", prompt_key=f"p{n}") for n in range(6)]


def test_each_prompt_is_counted_once(requests):
    ledger = Ledger(0.05)
    again = replace(requests[0], key="again")
    assert ledger.uncounted([*requests, again]) == requests
    ledger.count(requests[:4], scores(requests, 1.9), scores(requests, 1.5))
    assert ledger.uncounted([*requests, again]) == requests[4:]
    assert ledger.wager.num_requests == 4
    assert ledger.wager.gain == pytest.approx(0.4)


def test_what_could_not_be_scored_tells_nothing_and_is_not_asked_again(requests):
    ledger = Ledger(0.05)
    ledger.count(requests, scores(requests[:3], 1.9), scores(requests[1:], 1.5))
    assert ledger.wager.num_requests == 2
    assert ledger.uncounted(requests) == []


def test_what_chose_the_drafts_is_no_evidence_for_one_of_them(requests):
    ledger = Ledger(0.05)
    ledger.pass_over(requests[:4])
    assert ledger.uncounted(requests) == requests[4:]
    assert ledger.wager.num_requests == 0


def test_only_prompts_that_are_remembered_are_kept(requests):
    ledger = Ledger(0.05)
    ledger.count(requests, {}, {})
    ledger.keep_only({"p0", "p1"})
    assert ledger.uncounted(requests) == requests[2:]


def test_evidence_goes_on_after_a_restart_unless_it_was_about_another_level(requests):
    wager = Wager(0.05, log_wealth=2.0)
    same, other = Ledger(0.05), Ledger(0.01)
    for ledger in (same, other):
        ledger.resume(wager, requests)
        assert ledger.uncounted(requests) == []
    assert same.wager.log_wealth == 2.0
    assert other.wager.log_wealth == 0.0
