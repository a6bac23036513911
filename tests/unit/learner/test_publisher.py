from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drafter.create import create_random_draft, random_draft
from learner.admin import AdminClient
from learner.config import GateSettings, ReplaySettings, TrainSettings
from learner.evaluate import Evaluator
from learner.publisher import Publisher
from learner.replay import Replay
from learner.request import is_held_out
from learner.trainer import Trainer
from wire.artifact import TrainingReport

TRAINED: dict[str, torch.Tensor] = {}
TRAINING = TrainingReport(num_steps=1, num_tokens_seen=1, num_tokens_distinct=1, loss=1.0, seed=0)


@pytest.fixture
def replay(make_request):
    replay = Replay(ReplaySettings(recent_tokens=10_000, holdout_share=0.5), 64, seed=0)
    keys = (f"p{n}" for n in range(1000) if is_held_out(f"p{n}", 0.5))
    for n in range(32):
        replay.add(make_request(f"h{n}", first=n * 5, prompt_key=next(keys)))
    return replay


@pytest.fixture
def trained(spec, target_dir, target, make_request):
    """Trained once for all tests of this file: training is deterministic and the tests do not change it."""
    draft = random_draft(spec, target_dir, target, seed=0)
    if not TRAINED:
        trainer = Trainer(draft, target, TrainSettings(bfloat16=False, muon_rate=0.05))
        for _ in range(50):
            trainer.step([make_request(f"s{n}", first=n) for n in range(0, 40, 3)])
        TRAINED.update(trainer.candidate().core.state_dict())
    draft.core.load_state_dict(TRAINED)
    return draft


@pytest.fixture
def publisher(gateway, spec, target):
    def build(url: str = gateway.url, **settings: int) -> Publisher:
        evaluator = Evaluator(target, 3, dtype=torch.float32, max_context_rows=64)
        return Publisher(
            gateway.store,
            AdminClient(url),
            evaluator,
            spec=spec,
            target=target,
            settings=GateSettings(**settings),
            keep_versions=2,
        )

    return build


def test_a_better_draft_is_published_and_activated(publisher, trained, replay, gateway, monkeypatch):
    monkeypatch.setenv("PACELINE_OPERATOR_TOKEN", "secret")
    owner = publisher()
    assert owner.consider(trained, TRAINING, replay, 0) == "accepted"
    ((version, body, headers),) = gateway.activations
    assert (version, body) == (1, {"expected_active": 0, "force": False, "reason": owner.last_gate.reason})
    assert headers["Authorization"] == "Bearer secret"
    assert headers["Idempotency-Key"].startswith("learner-1-")
    manifest = gateway.store.verify(1)
    assert manifest.gate is not None
    assert manifest.gate.accepted
    assert (manifest.parent, manifest.origin, manifest.training) == (0, "learned", TRAINING)
    assert owner.num_published == 1
    assert owner.simulated_al == manifest.gate.candidate_al > 1.3


def test_the_same_draft_again_is_rejected_and_not_written(publisher, trained, replay, gateway):
    owner = publisher()
    owner.consider(trained, TRAINING, replay, 0)
    assert owner.consider(trained, TRAINING, replay, 1) == "rejected"
    assert gateway.store.versions() == [0, 1]
    assert dict(owner.decisions) == {"accepted": 1, "rejected": 1}


def test_without_a_gate_every_draft_serves_and_none_returns(publisher, trained, replay, gateway, spec, target_dir, target):
    owner = publisher(unjudged_every_steps=50)
    gateway.store.set_floor(0)
    worse = random_draft(spec, target_dir, target, seed=1)
    assert [owner.consider(draft, TRAINING, replay, active) for active, draft in enumerate((trained, worse, worse))] == [
        "accepted"
    ] * 3
    assert [(version, body["force"]) for version, body, _ in gateway.activations] == [(1, True), (2, True), (3, True)]
    assert gateway.store.manifest(2).gate is None
    assert not owner.decisions


@pytest.mark.parametrize(("status", "code"), [(409, "stale_expected_active"), (409, "swap_refused"), (422, "bad_artifact")])
def test_a_refusal_is_told_and_survived(publisher, trained, replay, gateway, status, code):
    gateway.refusal = (status, code)
    owner = publisher()
    assert owner.consider(trained, TRAINING, replay, 0) == code
    assert gateway.store.active() == 0
    assert "draft 1" in owner.last_outcome


def test_an_absent_gateway_is_survived(publisher, trained, replay, gateway):
    assert publisher("http://127.0.0.1:9").consider(trained, TRAINING, replay, 0) == "unreachable"


def test_a_full_disk_is_survived(gateway, target_dir, state_dir):
    script = Path(__file__).parent / "full_disk.py"
    done = subprocess.run([sys.executable, script, target_dir, state_dir], capture_output=True, text=True, check=True)
    outcome, reason = done.stdout.splitlines()
    assert outcome == "disk_error"
    assert "cannot write model.safetensors" in reason
    assert gateway.store.versions() == [0]
    assert not list(gateway.store.root.glob(".staging-*"))


def test_only_the_active_draft_the_floor_and_the_last_one_used_stay_in_memory(
    publisher, trained, replay, gateway, spec, target_dir, target
):
    owner = publisher()
    gateway.store.set_floor(0)
    assert owner.consider(trained, TRAINING, replay, 0) == "accepted"
    for _ in range(3):
        worse = create_random_draft(gateway.store, spec, target_dir, seed=5)
        gateway.store.set_active(worse)
        assert owner.consider(trained, TRAINING, replay, worse) == "returned"
        assert len(owner._published._held) <= 3


def test_a_score_that_is_not_finite_counts_for_nothing(publisher, trained, replay):
    """One such number would make all evidence one, and no checkpoint could be read that has it."""
    owner = publisher()
    good = next(iter(replay.held_out))
    huge = torch.full_like(good.rows.hidden_TD, 3e38)
    hot = replace(good, key="hot", rows=replace(good.rows, hidden_TD=huge, temperature=1.0))
    assert owner._evaluator.scores(trained, [good, hot]).keys() == {good.key}
    assert [request.key for request in owner.take_unscorable()] == ["hot"]


def test_a_request_that_cannot_be_scored_is_handed_out_and_the_others_decide(publisher, trained, replay):
    bad = list(replay.held_out)[2]
    bad.rows.next_tokens_T[8] = 10_000
    owner = publisher()
    assert owner.consider(trained, TRAINING, replay, 0) == "accepted"
    assert owner.last_gate is not None
    assert owner.last_gate.num_requests == 31
    assert [request.key for request in owner.take_unscorable()] == [bad.key]
    assert owner.take_unscorable() == []


def test_too_little_evidence_publishes_nothing(publisher, trained, gateway):
    assert publisher().consider(trained, TRAINING, Replay(ReplaySettings(), 64, seed=0), 0) == "waiting"
    assert gateway.store.versions() == [0]


def test_a_winning_floor_is_activated_by_force(publisher, trained, replay, gateway, spec, target_dir, target):
    owner = publisher()
    owner.consider(trained, TRAINING, replay, 0)
    gateway.store.set_floor(1)
    worse = create_random_draft(gateway.store, spec, target_dir, seed=5)
    gateway.store.set_active(worse)
    candidate = random_draft(spec, target_dir, target, seed=6)
    assert owner.consider(candidate, TRAINING, replay, worse) == "floor"
    version, body, _ = gateway.activations[-1]
    assert (version, body["expected_active"], body["force"]) == (1, worse, True)
    assert body["reason"].startswith("floor: gain of +")
    assert gateway.store.active() == owner.last_activated == 1


def test_old_versions_are_pruned_but_never_the_active_or_its_parent(publisher, trained, replay, gateway, spec, target_dir):
    for seed in range(3):
        create_random_draft(gateway.store, spec, target_dir, seed=seed)
    publisher().consider(trained, TRAINING, replay, 0)
    assert gateway.store.versions() == [0, 3, 4]


def test_an_unreadable_incumbent_stops_publishing_not_learning(publisher, trained, replay, gateway):
    (gateway.store.directory(0) / "model.safetensors").write_bytes(b"")
    assert publisher().consider(trained, TRAINING, replay, 0) == "unusable"
