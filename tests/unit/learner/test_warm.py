"""A draft that served before serves again, untrained, when its domain returns. Scores of published drafts are synthetic: the
evaluator is told them, as it is of a candidate that has just been published."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
import torch

from drafter.artifact import publish_draft
from drafter.create import random_draft
from learner.admin import AdminClient
from learner.config import GateSettings, ReplaySettings
from learner.evaluate import Evaluator, Score
from learner.published import PublishedDrafts
from learner.publisher import Publisher
from learner.replay import Replay
from learner.request import CapturedRequest, is_held_out
from learner.warm import WarmDrafts, newest_unseen
from wire.artifact import GateReport, TrainingReport

TRAINING = TrainingReport(num_steps=1, num_tokens_seen=1, num_tokens_distinct=1, loss=1.0, seed=0)
GATE = GateReport(accepted=True, reason="", candidate_al=1.9, incumbent_al=1.4, gain_low=0.3, gain_high=0.7, num_requests=16)
SETTINGS = GateSettings(shift_tokens=400, num_resamples=300)
FLOOR, CODE_DRAFT, CHAT_DRAFT = 0, 1, 2
AL = {FLOOR: {"code": 1.1, "chat": 1.1}, CODE_DRAFT: {"code": 1.9, "chat": 1.3}, CHAT_DRAFT: {"code": 1.4, "chat": 1.9}}
SPREAD = 0.15


class Scene:
    """A store with a floor, a draft for code and, active now, one for chat; and traffic that its drafts have known scores on."""

    def __init__(self, gateway, spec, target_dir, target, make_request) -> None:
        self.gateway = gateway
        self.candidate = random_draft(spec, target_dir, target, seed=9)
        self._spec, self._make_request = spec, make_request
        self._rng = random.Random(4)
        self._num_requests = 0
        self.evaluator = Evaluator(target, 3, dtype=torch.float32, max_context_rows=64)
        for parent in (FLOOR, CODE_DRAFT):
            self.publish(parent)
        gateway.store.set_floor(FLOOR)
        gateway.store.set_active(CHAT_DRAFT)
        self.owner = Publisher(
            gateway.store,
            AdminClient(gateway.url),
            self.evaluator,
            spec=spec,
            target=target,
            settings=SETTINGS,
            keep_versions=2,
        )
        self.replay = Replay(ReplaySettings(holdout_share=0.2), 64, seed=0)

    def publish(self, parent: int) -> int:
        return publish_draft(
            self.gateway.store, self.candidate, self._spec, origin="learned", parent=parent, training=TRAINING, gate=GATE
        )

    def serve(self, domain: str, num_requests: int, al: dict[int, dict[str, float]] = AL) -> list[CapturedRequest]:
        """Requests of one domain, each of 20 completion tokens; a request's difficulty is the same for every draft."""
        served = []
        for _ in range(num_requests):
            self._num_requests += 1
            name = f"r{self._num_requests}"
            request = self._make_request(name, first=self._num_requests, total=23, domain=domain, prompt_key=f"p{name}")
            difficulty = self._rng.gauss(0.0, 0.3)
            for version, lengths in al.items():
                length = lengths[domain] + difficulty + self._rng.gauss(0.0, SPREAD)
                self.evaluator.remember(version, {name: Score(name, 18 * length, 18, request.prompt_key)})
            self.replay.add(request)
            served.append(request)
        return served

    def round(self) -> str:
        active = self.gateway.store.active()
        return self.owner.consider(self.candidate, TRAINING, self.replay, active)


@pytest.fixture
def scene(gateway, spec, target_dir, target, make_request) -> Scene:
    return Scene(gateway, spec, target_dir, target, make_request)


def test_a_returning_domain_gets_its_own_draft_back_within_one_round(scene):
    scene.serve("chat", 60)
    for _ in range(20):
        assert scene.round() == "rejected"
    assert scene.gateway.activations == []
    scene.serve("code", 20)
    assert scene.round() == "returned"
    ((version, body, _),) = scene.gateway.activations
    assert (version, body["expected_active"], body["force"]) == (CODE_DRAFT, CHAT_DRAFT, False)
    assert body["reason"].startswith("returning domain: gain of +0.")
    assert scene.owner.last_activated == scene.gateway.store.active() == CODE_DRAFT
    assert scene.owner.simulated_al == pytest.approx(1.9, abs=0.3)
    scene.serve("chat", 20)
    assert scene.round() == "returned"
    assert scene.gateway.store.active() == CHAT_DRAFT


def test_a_draft_that_is_worse_than_the_floor_everywhere_gives_way_to_it(scene):
    scene.serve("chat", 40, AL | {FLOOR: {"chat": 2.4}})
    assert scene.round() == "floor"
    version, body, _ = scene.gateway.activations[-1]
    assert (version, body["force"]) == (FLOOR, True)
    assert body["reason"].startswith("floor: gain of +0.")


def test_warm_drafts_that_are_as_good_as_the_active_one_stay_out(scene):
    """A hundred rounds at 5 % each, with three drafts that differ by noise alone, would swap in nearly all of them."""
    equal = {version: {"chat": 1.6} for version in AL}
    for _ in range(100):
        scene.serve("chat", 3, equal)
        assert scene.owner.warm.find_return(CHAT_DRAFT, scene.replay) is None


def test_a_draft_the_gateway_will_not_have_back_is_asked_for_once(scene):
    scene.gateway.refusal = (409, "draft_not_accepted")
    scene.serve("code", 40)
    assert scene.round() == "draft_not_accepted"
    assert scene.round() == "rejected"
    assert len(scene.gateway.activations) == 1
    assert scene.owner.warm.versions(CHAT_DRAFT) == [FLOOR]


def test_drafts_from_before_the_vocabulary_grew_are_not_warm(scene, spec, target):
    larger = msgspec.structs.replace(spec, draft_vocab_size=spec.draft_vocab_size + 1)
    published = PublishedDrafts(scene.gateway.store, scene.evaluator, larger, target)
    warm = WarmDrafts(scene.gateway.store, published, SETTINGS)
    warm.champions["t/code"] = CODE_DRAFT
    assert warm.versions(CHAT_DRAFT) == []
    assert scene.owner.warm.versions(CHAT_DRAFT) == [FLOOR, CODE_DRAFT]


def test_the_best_draft_of_each_domain_stays_on_disk_however_many_follow(scene):
    warm, store = scene.owner.warm, scene.gateway.store
    warm.crown(CODE_DRAFT, FLOOR, {"t/code": scene.serve("code", 8)})
    for _ in range(6):
        version = scene.publish(store.active())
        al = AL | {version: AL[CHAT_DRAFT]}
        warm.crown(version, store.active(), {"t/code": scene.serve("code", 8, al), "t/chat": scene.serve("chat", 8, al)})
        store.set_active(version)
        warm.note_served(version)
        scene.owner._prune(version)
    assert warm.champions["t/code"] == CODE_DRAFT
    assert {FLOOR, CODE_DRAFT, warm.champions["t/chat"]} <= set(store.versions())
    assert CODE_DRAFT in warm.versions(version)
    assert len(store.versions()) <= 6


def test_a_domain_nobody_asks_of_has_no_veto_while_its_best_draft_is_warm(scene):
    """Else a draft could never turn to what is asked now: it would have to stay as good at what is not."""
    groups = {"t/code": scene.serve("code", 5), "t/chat": scene.serve("chat", 5)}
    chat = scene.serve("chat", 8)
    assert set(scene.owner._guarded(groups, chat)) == {"t/code", "t/chat"}
    scene.owner.warm.champions["t/code"] = CODE_DRAFT
    assert set(scene.owner._guarded(groups, chat)) == {"t/chat"}
    assert set(scene.owner._guarded(groups, [*chat, *groups["t/code"][:1]])) == {"t/code", "t/chat"}


def test_requests_that_kept_the_best_draft_of_a_domain_do_not_bring_it_back_too(scene):
    """They were looked at to choose it: it is new ones that have to speak for it."""
    warm, store = scene.owner.warm, scene.gateway.store
    version = scene.publish(CHAT_DRAFT)
    al = AL | {version: AL[CHAT_DRAFT]}
    warm.crown(version, CODE_DRAFT, {"t/code": scene.serve("code", 40, al)})
    assert warm.champions == {"t/code": CODE_DRAFT}
    store.set_active(version)
    warm.note_served(version)
    assert warm.find_return(version, scene.replay) is None
    scene.serve("code", 40, al)
    found = warm.find_return(version, scene.replay)
    assert found is not None
    assert found.version == CODE_DRAFT


def test_domains_of_too_few_requests_have_no_best_draft(scene):
    scene.owner.warm.crown(CHAT_DRAFT, CODE_DRAFT, {"t/code": scene.serve("code", 2)})
    assert scene.owner.warm.champions == {}


@pytest.fixture
def put(make_request) -> Callable[[Replay, str, float, bool], CapturedRequest]:
    """Add a request of 13 completion tokens to a replay, captured at a given time."""

    def build(replay: Replay, key: str, at_s: float, held_out: bool) -> CapturedRequest:
        prompts = (f"{key}.{n}" for n in range(1000))
        prompt_key = next(one for one in prompts if is_held_out(one, 0.5) is held_out)
        request = replace(make_request(key, prompt_key=prompt_key), captured_at_s=at_s)
        replay.add(request)
        return request

    return build


def test_the_newest_unseen_requests_are_the_held_out_ones_and_all_that_came_after_the_draft(put):
    replay = Replay(ReplaySettings(holdout_share=0.5), 64, seed=0)
    for key, at_s, held_out in (("a", 1.0, True), ("b", 2.0, False), ("c", 3.0, True), ("d", 4.0, False), ("e", 5.0, False)):
        put(replay, key, at_s, held_out)
    assert [request.key for request in newest_unseen(replay, 1000, at_least=1, since_s=3.5)] == ["e", "d", "c", "a"]
    assert [request.key for request in newest_unseen(replay, 30, at_least=1, since_s=3.5)] == ["e", "d"]
    assert [request.key for request in newest_unseen(replay, 1, at_least=1, since_s=3.5)] == ["e"]
    assert [request.key for request in newest_unseen(replay, 1, at_least=2, since_s=3.5)] == ["e", "d"]
    assert [request.key for request in newest_unseen(replay, 1000, at_least=1)] == ["e", "c", "a"]
