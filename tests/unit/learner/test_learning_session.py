from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import msgspec
import pytest
import torch
from waiting import DEADLINE_S, wait_until

from drafter.create import grow_draft
from learner.checkpoint import load_checkpoint, save_checkpoint
from learner.config import LearnerConfig
from learner.main import run, run_from_command_line
from learner.request import is_held_out
from learner.session import LearningSession
from learner.start import wait_for_draft
from wire.errors import ConfigError
from wire.store import DraftStore


@pytest.fixture
def config(state_dir, target_dir, gateway):
    def build(**learner) -> LearnerConfig:
        defaults = {
            "nice": 0,
            "checkpoint_every_s": 0.2,
            "replay": {"holdout_share": 0.3, "max_passes": 200},
            "train": {"muon_rate": 0.05, "bfloat16": False, "batch_tokens": 60},
            "gate": {"every_s": 0.2, "num_resamples": 200},
        }
        data = {
            "learner": defaults | learner,
            "target_dir": str(target_dir),
            "state_dir": str(state_dir),
            "capture_endpoint": "tcp://127.0.0.1:*",
            "admin_url": gateway.url,
            "num_speculative_tokens": 3,
        }
        return LearnerConfig.build(data, source="test")

    return build


@pytest.fixture
def running(config, connect_engine):
    """A session whose loop runs in a thread, with traffic from a fake engine."""
    session = LearningSession(config(), 0)
    stopping = threading.Event()
    thread = threading.Thread(target=run, args=(session, stopping))
    thread.start()
    engine = connect_engine(session.receiver.endpoint)
    for n in range(48):
        engine.serve(f"r{n}", first=n, prompt=3 + n % 5, total=24)
    yield session
    stopping.set()
    thread.join()
    session.close()


def test_traffic_becomes_a_better_draft_that_serves(running, gateway):
    wait_until(lambda: gateway.store.active() != 0)
    manifest = gateway.store.verify(gateway.store.active())
    assert manifest.origin == "learned"
    assert manifest.gate is not None
    assert manifest.gate.candidate_al > manifest.gate.incumbent_al
    wait_until(lambda: gateway.reports and gateway.reports[-1]["num_published"] >= 1)
    report = gateway.reports[-1]
    assert report["num_steps"] > 0
    assert report["num_received_rows"] > 0
    assert report["buffer_requests"] > 0
    (coverage,) = report["vocabulary_coverage"]
    assert (coverage["tenant"], coverage["domain"], coverage["share"]) == ("t", "code", 1.0)


def test_a_paused_learner_stands_still_and_goes_on(running, gateway):
    wait_until(lambda: running.trainer.num_steps > 0)
    gateway.paused = True
    wait_until(lambda: running.is_paused)
    num_turns, receive = 0, running.receive

    def counted() -> None:
        nonlocal num_turns
        num_turns += 1
        receive()

    running.receive = counted
    wait_until(lambda: num_turns >= 2)  # the step it was at is over
    steps, until = running.trainer.num_steps, num_turns + 5
    wait_until(lambda: num_turns >= until)
    assert running.trainer.num_steps == steps
    gateway.paused = False
    wait_until(lambda: running.trainer.num_steps > steps)


def test_divergence_restores_the_checkpoint_and_halves_the_rate(config, make_request):
    session = LearningSession(config(), 0)
    bad = make_request("bad", prompt_key="p0")
    bad.rows.aux_TX[:] = float("nan")
    session.replay.recent.add(bad)
    assert session.train()
    assert session.report().num_restores == 1
    assert session.trainer.optimiser.rate_scale == 0.5
    assert session.replay.num_requests == 0
    assert all(bool(value.isfinite().all()) for value in session.trainer.core.state_dict().values())
    session.close()


def test_vocabulary_follows_the_traffic_once_it_pays(config, make_request):
    session = LearningSession(config(), 0)

    def refresh():
        session.vocabulary.refresh(session.trainer, session.replay, session.history, ())
        return session.trainer.head.vocabulary

    before = session.trainer.head.vocabulary
    assert refresh() is before
    session.replay.counts_V[63] += 100
    assert 63 in refresh().ids_U.tolist()
    session.close()


def test_a_domain_that_needs_more_tokens_than_there_are_says_how_many(config, make_request):
    """The estimate alone is no alarm: it is the coverage of what arrives that falls short."""
    session = LearningSession(config(), 0)
    requests = []
    for key in ("k", "l", "m"):
        request = make_request(key, prompt_key="q1", total=1984)
        requests.append(replace(request, rows=replace(request.rows, next_tokens_T=torch.arange(1984) % 62)))
        session._remember(requests[-1], on_disk=False)
        if key == "k":
            session.vocabulary.refresh(session.trainer, session.replay, session.history, session.coverage.view)
            assert session.report().wanted_vocabulary_size is None, "too little was seen"
    session.vocabulary.refresh(session.trainer, session.replay, session.history, session.coverage.view)
    report = session.report()
    assert (report.wanted_vocabulary_size, report.vocabulary_shortfall) == (61, "")  # of 62 that are said alike often
    for request in requests:
        session.coverage.note(request, 0)
    session.vocabulary.refresh(session.trainer, session.replay, session.history, session.coverage.view)
    shortfall = session.report().vocabulary_shortfall
    assert shortfall.startswith("48 draft tokens cover ")
    assert "--set draft.vocab_size=61" in shortfall
    session.close()


def test_requests_that_are_too_old_are_gone_from_memory_and_disk(config, make_request, state_dir):
    session = LearningSession(config(replay={"max_age_s": 3600.0, "holdout_share": 0.3}), 0)
    for n in range(20):
        age_s = 3700.0 if n % 2 else 3500.0
        request = make_request(f"k{n}", prompt_key=f"q{n}")
        session._remember(replace(request, captured_at_s=time.time() - age_s), on_disk=True)
    session.checkpoint()
    assert {request.key for request in session.replay.everything()} == {f"k{n}" for n in range(0, 20, 2)}
    assert len(list((state_dir / "learner" / "requests").glob("*.safetensors"))) == 10
    session.close()


def test_what_a_restart_pushes_out_of_memory_is_gone_from_disk_too(config, make_request, state_dir):
    first = LearningSession(config(replay={"holdout_share": 0.3, "fresh_tokens": 0}), 0)
    for n in range(4):
        first._remember(make_request(f"k{n}", prompt_key="q1"), on_disk=True)
    while len(first.replay.visits()) < 4:
        first.train()
    first.close()
    smaller = {"holdout_share": 0.3, "fresh_tokens": 1000, "recent_tokens": 26, "reservoir_tokens": 0}
    second = LearningSession(config(replay=smaller), 0)
    assert {request.key for request in second.replay.everything()} == {"k2", "k3"}
    assert len(list((state_dir / "learner" / "requests").glob("*.safetensors"))) == 2
    second.close()


def test_learning_goes_on_with_a_draft_that_has_grown(config, make_request, state_dir, target_dir, spec):
    first = LearningSession(config(), 0)
    for n in range(4):
        first._remember(make_request(f"k{n}", prompt_key=f"q{n}"), on_disk=True)
    while first.trainer.num_steps < 3:
        first.train()
    weight = first.trainer.core.fc.weight.detach().clone()
    remembered = {request.key for request in first.replay.everything()}
    first.close()
    larger = msgspec.structs.replace(spec, draft_vocab_size=spec.draft_vocab_size + 8)
    second = LearningSession(config(), grow_draft(DraftStore(state_dir), 0, larger, target_dir))
    assert second.origin == "its checkpoint at step 3"
    assert torch.equal(second.trainer.core.fc.weight, weight)
    assert second.trainer.head.weight_UD.shape[0] == spec.draft_vocab_size + 8
    assert {request.key for request in second.replay.everything()} == remembered
    assert second.train()
    second.close()


def test_a_new_session_resumes_where_the_old_one_was(config, make_request):
    replay = {"holdout_share": 0.3, "max_passes": 200, "fresh_tokens": 0}
    first = LearningSession(config(replay=replay), 0)
    for n in range(4):
        first._remember(make_request(f"k{n}", prompt_key=f"q{n}"), on_disk=True)
    while first.trainer.num_steps < 3:
        first.train()
    first.publisher.judge.begin(0, first.replay)
    first.publisher.judge.ledger.wager.count(0.5, 100)
    first.publisher.warm.champions["t/code"] = 0
    first.close()
    second = LearningSession(config(replay=replay), 0)
    assert second.trainer.num_steps == 3
    assert second.replay.num_tokens == first.replay.num_tokens
    assert second.replay.visits() == first.replay.visits()
    assert torch.equal(second.trainer.core.fc.weight, first.trainer.core.fc.weight)
    assert second.origin == "its checkpoint at step 3"
    assert second.publisher.judge.against == 0
    assert second.publisher.judge.ledger.wager == first.publisher.judge.ledger.wager
    assert second.publisher.judge.ledger.uncounted(second.replay.everything()) == []
    assert second.publisher.warm.champions == {"t/code": 0}
    second.close()


def test_what_comes_of_a_request_after_it_was_closed_early_is_not_a_second_one(config, make_request):
    """Teacher rows, visits and the file on disk go by the key: a second request under it would be taught the first one's rows."""
    session = LearningSession(config(replay={"recent_tokens": 13, "fresh_tokens": 0, "holdout_share": 0.3, "max_passes": 2}), 0)
    begun, rest = (make_request("long", total=total, prompt_key="q1") for total in (16, 30))
    session._remember(begun, on_disk=True)
    session._remember(make_request("other", prompt_key="q1"), on_disk=True)
    session._remember(rest, on_disk=True)
    assert sorted(request.key for request in session.replay.trainable()) == ["long", "other"]
    assert session.replay.num_tokens_distinct == 2 * begun.num_tokens
    assert {request.key: request.num_tokens for request in session.archive.read_all()} == {"long": 13, "other": 13}
    session.close()


def test_an_unwritable_state_directory_does_not_stop_learning(config, make_request, state_dir):
    session = LearningSession(config(), 0)
    (state_dir / "learner").write_text("in the way")
    session._remember(make_request("k", prompt_key="q"), on_disk=True)
    session.train()
    session.checkpoint()
    session.close()


def test_what_became_of_an_evaluation_is_reported_in_words(config, gateway):
    session = LearningSession(config(), 0)
    session.gate()
    assert session.report().outcome == "0 of 4 unseen requests needed for a judgement"
    wait_until(lambda: gateway.reports and gateway.reports[-1]["outcome"] == session.report().outcome)
    session.close()


def test_without_a_gate_drafts_follow_one_another_by_steps_and_not_by_time(config, make_request, gateway):
    session = LearningSession(config(gate={"unjudged_every_steps": 3, "every_s": 3600.0}), 0)
    wait_until(lambda: session.reporter.is_connected)
    for n in range(4):
        session._remember(make_request(f"k{n}", prompt_key=f"q{n}"), on_disk=False)
    due = []
    while session.trainer.num_steps < 7:
        session.train()
        due.append((session.trainer.num_steps, session.gate_is_due()))
        if due[-1][1]:
            session.gate()
            # The gateway's word on what is active comes with its reply to a report; till then it looks as if it was rolled back.
            wait_until(lambda: session.active_version == gateway.store.active())
    assert [number for number, is_due in due if is_due] == [3, 6]
    assert gateway.store.active() == 2
    session.close()


def test_another_target_is_a_start_up_error(config, target_dir):
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, target_dir / "other.safetensors")
    with pytest.raises(ConfigError, match="another target"):
        LearningSession(config(), 0)


def test_waiting_for_a_draft_ends_when_told_or_when_there_is_one(tmp_path, state_dir):
    stopping = threading.Event()
    stopping.set()
    assert wait_for_draft(tmp_path / "empty", stopping) is None
    assert wait_for_draft(state_dir, threading.Event()) == 0


def test_process_ends_well_on_sigterm_and_survives_sigkill(config, state_dir, tmp_path):
    path = tmp_path / "learner.json"
    path.write_text(config().model_dump_json())
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    def start() -> subprocess.Popen:
        return subprocess.Popen([sys.executable, "-m", "learner.main", str(path)], env=environment)

    checkpoint = state_dir / "learner" / "checkpoint.safetensors"
    process = start()
    wait_until(checkpoint.is_file)
    process.send_signal(signal.SIGKILL)
    process.wait()
    checkpoint.unlink()
    process = start()
    wait_until(checkpoint.is_file)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=DEADLINE_S) == 0


def test_a_bad_configuration_is_told_in_one_line(tmp_path, monkeypatch, capsys):
    path = tmp_path / "learner.json"
    path.write_text(json.dumps({"nonsense": 1}))
    monkeypatch.setattr(sys, "argv", ["learner", str(path)])
    assert run_from_command_line() == 1
    assert "nonsense" in capsys.readouterr().err


def test_store_of_the_session_is_the_one_on_disk(config, state_dir):
    session = LearningSession(config(), 0)
    assert DraftStore(state_dir).active() == session.active_version
    session.close()


def test_a_halved_rate_recovers_after_clean_steps(config, make_request, monkeypatch):
    monkeypatch.setattr("learner.recovery._CLEAN_STEPS_BEFORE_FASTER", 2)
    session = LearningSession(config(), 0)
    session._remember(make_request("k", prompt_key="q1"), on_disk=False)
    session.trainer.optimiser.rate_scale = 0.25
    scales = []
    for _ in range(6):
        session.train()
        scales.append(session.trainer.optimiser.rate_scale)
    assert scales == [0.25, 0.5, 0.5, 1.0, 1.0, 1.0]
    session.close()


def test_the_rate_follows_the_data_and_not_the_steps(config, make_request):
    train = {"muon_rate": 0.05, "bfloat16": False, "batch_tokens": 10, "settling_tokens": 26.0}
    session = LearningSession(config(replay={"holdout_share": 0.3, "max_passes": 4, "fresh_tokens": 0}, train=train), 0)

    def shares(key: str) -> list[float]:
        session._remember(make_request(key, prompt_key="q1"), on_disk=False)
        found = []
        session._log_at_s = 0.0
        while session.train():
            found.append(json.loads((session._directory / "metrics.jsonl").read_text().splitlines()[-1])["rate_share"])
            session._log_at_s = 0.0
        return found

    first, later = shares("k0"), shares("k1")
    assert first == pytest.approx([(1 + 13 / 26) ** -0.5] * 4)
    assert later == pytest.approx([(1 + 26 / 26) ** -0.5] * 4)
    session.close()


@pytest.mark.parametrize("error", [IndexError("out of range"), RuntimeError("shapes do not fit"), ValueError("no number")])
def test_a_batch_that_cannot_be_computed_is_dropped_and_leaves_nothing_behind(config, make_request, monkeypatch, error):
    def fail(*_):
        with torch.no_grad():
            session.trainer.core.fc.weight.add_(1.0)
        raise error

    session = LearningSession(config(), 0)
    before = session.trainer.core.fc.weight.detach().clone()
    session._remember(make_request("k", prompt_key="q1"), on_disk=True)
    monkeypatch.setattr(session.trainer, "step", fail)
    assert session.train()
    assert not session.train()
    report = session.report()
    assert (report.num_restores, report.num_dropped_requests) == (1, 1)
    assert torch.equal(session.trainer.core.fc.weight, before)
    assert session.trainer.optimiser.rate_scale == 1.0
    assert list(session.archive.read_all()) == []
    session.close()


def test_a_batch_without_anchor_is_passed_over(config, make_request):
    session = LearningSession(config(), 0)
    session._remember(make_request("k", prompt_key="q1", prompt=16), on_disk=False)
    assert session.train()
    report = session.report()
    assert (report.num_steps, report.num_restores, report.num_dropped_requests) == (0, 0, 0)
    session.close()


def test_evidence_that_cannot_be_scored_is_dropped_and_the_gate_goes_on(config, make_request):
    session = LearningSession(config(), 0)
    held_out = [f"p{n}" for n in range(100) if is_held_out(f"p{n}", 0.3)]
    for n in range(6):
        session._remember(make_request(f"h{n}", first=n, prompt_key=held_out[n]), on_disk=True)
    next(iter(session.replay.held_out)).rows.next_tokens_T[8] = 10_000
    session.gate()
    assert session.report().num_dropped_requests == 1
    assert sorted(request.key for request in session.replay.held_out) == ["h1", "h2", "h3", "h4", "h5"]
    assert sorted(request.key for request in session.archive.read_all()) == ["h1", "h2", "h3", "h4", "h5"]
    assert sum(session.publisher.decisions.values()) == 1
    session.close()


def test_what_the_assembler_lost_is_reported(config, connect_engine, gateway):
    session = LearningSession(config(replay={"holdout_share": 0.3, "max_completion_rows": 5}), 0)
    engine = connect_engine(session.receiver.endpoint)
    engine.serve("r0", first=1, prompt=4, total=20)
    engine.serve("r0", first=1, prompt=4, total=20)

    def is_told() -> bool:
        session.receive()
        return session.report().num_late_spans == 17

    wait_until(is_told)
    assert session.report().num_cut_rows == 20 - 3 - 5
    wait_until(lambda: gateway.reports and gateway.reports[-1]["num_late_spans"] == 17)
    session.close()


def test_weights_that_are_not_finite_are_never_written(config, state_dir):
    session = LearningSession(config(), 0)
    with torch.no_grad():
        session.trainer.core.fc.weight.fill_(float("nan"))
    session.close()
    assert session.report().num_restores == 1
    second = LearningSession(config(), 0)
    assert second.origin.startswith("its checkpoint")
    second.close()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("counts_V", torch.zeros(63)),
        ("optimiser.rate_scale", torch.zeros(2)),
        ("optimiser.rate_scale", torch.tensor(0.0)),
        ("average.fc.weight", torch.zeros(2)),
        ("core.fc.weight", torch.full((1,), float("nan"))),
    ],
)
def test_a_checkpoint_that_does_not_fit_starts_anew_from_the_draft(config, make_request, state_dir, name, value):
    first = LearningSession(config(), 0)
    untouched = first.trainer.core.fc.weight.detach().clone()
    first._remember(make_request("k", prompt_key="q1"), on_disk=True)
    first.train()
    first.close()
    path = state_dir / "learner" / "checkpoint.safetensors"
    tensors, progress = load_checkpoint(path, first._spec)
    assert name in tensors
    save_checkpoint(path, tensors | {name: value}, progress)
    second = LearningSession(config(), 0)
    assert second.origin == "draft 0"
    assert second.trainer.num_steps == second.trainer.optimiser.num_steps == 0
    assert torch.equal(second.trainer.core.fc.weight, untouched)
    second.close()
    assert load_checkpoint(path, first._spec) is not None
