"""Evidence for a trained draft against a random one, on requests that come in rounds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from drafter.create import random_draft
from drafter.draft import Draft
from learner.config import GateSettings, ReplaySettings, TrainSettings
from learner.evaluate import Evaluator
from learner.gate import decide
from learner.judge import Judge
from learner.published import PublishedDrafts
from learner.replay import Replay
from learner.request import CapturedRequest, is_held_out
from learner.trainer import Trainer
from learner.warm import newest_unseen
from wire.artifact import GateReport

SHARE = 0.5
TRAINED: dict[str, torch.Tensor] = {}


class Scene:
    """A judge of drafts against the random draft 0, and a replay whose requests are all held out."""

    def __init__(self, gateway, spec, target_dir, target, make_request) -> None:
        evaluator = Evaluator(target, 3, dtype=torch.float32, max_context_rows=64)
        self.published = PublishedDrafts(gateway.store, evaluator, spec, target)
        self.judge = Judge(evaluator, self.published, GateSettings())
        self.replay = Replay(ReplaySettings(recent_tokens=10_000, holdout_share=SHARE), 64, seed=0)
        self.make_draft: Callable[[int], Draft] = lambda seed: random_draft(spec, target_dir, target, seed=seed)
        self.trained = self.make_draft(0)
        if not TRAINED:
            trainer = Trainer(self.make_draft(0), target, TrainSettings(bfloat16=False, muon_rate=0.05))
            for _ in range(60):
                trainer.step([make_request(f"s{n}", first=n) for n in range(0, 40, 3)])
            TRAINED.update(trainer.candidate().core.state_dict())
        self.trained.core.load_state_dict(TRAINED)
        self._prompts = (f"p{n}" for n in range(10_000) if is_held_out(f"p{n}", SHARE))
        self._make_request = make_request
        self._num_requests = 0
        self.num_tokens = 0
        """Learned from; every round doubles it."""

    def serve(self, num_requests: int) -> list[CapturedRequest]:
        served = []
        for _ in range(num_requests):
            self._num_requests += 1
            prompt_key = next(self._prompts)
            request = self._make_request(f"h{self._num_requests}", first=self._num_requests * 5, prompt_key=prompt_key)
            self.replay.add(request)
            served.append(request)
        return served

    def round(self, candidate: Draft, active: int = 0) -> GateReport:
        window = newest_unseen(self.replay, 2000, at_least=4)
        self.judge.begin(active, self.replay)
        self.num_tokens = 2 * self.num_tokens or 100
        return self.judge.judge(candidate, window, self.published.scores(0, window) or {}, {}, num_tokens=self.num_tokens)[0]


@pytest.fixture
def scene(gateway, spec, target_dir, target, make_request) -> Scene:
    return Scene(gateway, spec, target_dir, target, make_request)


def test_evidence_adds_up_over_rounds_until_it_suffices(scene):
    found = []
    for _ in range(10):
        scene.serve(4)
        report = scene.round(scene.trained)
        found.append(report.evidence)
        if report.accepted:
            break
        assert "is not sure yet: evidence" in report.reason
    assert report.accepted
    assert len(found) > 1
    assert found == sorted(found)
    assert report.num_counted == 4 * len(found)
    assert report.counted_gain > 0.1


def test_a_request_is_counted_once_however_often_is_looked(scene):
    scene.serve(6)
    for _ in range(5):
        scene.round(scene.trained)
    assert scene.judge.ledger.wager.num_requests == 6
    scene.serve(2)
    assert scene.round(scene.trained).num_counted == 8


def test_evidence_of_earlier_weights_does_not_publish_later_ones_that_do_no_better(scene):
    for _ in range(8):
        scene.serve(4)
        scene.round(scene.trained)
    assert scene.judge.ledger.wager.is_won
    scene.serve(4)
    report = scene.round(scene.make_draft(0))
    assert not report.accepted
    assert report.evidence == pytest.approx(report.evidence_needed)
    assert "newest requests is below" in report.reason


def test_another_active_draft_starts_the_evidence_anew_and_counts_nothing_twice(scene):
    scene.serve(6)
    scene.round(scene.trained)
    scene.serve(3)
    assert scene.round(scene.trained, active=1).num_counted == 3
    assert scene.round(scene.trained, active=2).num_counted == 0


def test_where_nothing_new_arrives_a_draft_that_has_learned_is_judged_by_all_there_is(scene):
    scene.serve(12)
    assert not scene.round(scene.make_draft(0)).accepted
    report = scene.round(scene.trained)
    assert report.accepted
    assert "newest requests, asked again" in report.reason
    assert scene.judge.num_recounts == 1
    assert (report.num_counted, report.num_requests) == (12, 12)
    assert report.evidence < report.evidence_needed


def test_asking_the_same_requests_again_and_again_takes_more_sureness_each_time(scene, monkeypatch):
    levels = []
    monkeypatch.setattr(
        "learner.judge.decide",
        lambda *parts, recount_level: levels.append(recount_level) or decide(*parts, recount_level=recount_level),
    )
    scene.serve(8)
    for _ in range(4):
        scene.round(scene.make_draft(0))
    assert levels == [None, *(pytest.approx(0.0125 / (n * (n + 1))) for n in (1, 2, 3))]


def test_the_same_requests_are_asked_again_only_when_much_has_been_learned_since(scene):
    scene.serve(8)
    scene.round(scene.make_draft(0))
    asked = []
    for num_tokens in (1000, 1200, 1249, 1250, 1500, 1600):
        scene.num_tokens = num_tokens / 2
        scene.round(scene.make_draft(0))
        asked.append(scene.judge.num_recounts)
    assert asked == [1, 1, 1, 2, 2, 3]
