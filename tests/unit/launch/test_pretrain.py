"""Pretraining against the real gateway and the real learner; only the engine is a stand-in, which captures what it answers."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from aiohttp import web
from sample_messages import capture_span, capture_step, learner_report
from waiting import wait_until

from drafter.create import create_random_draft
from drafter.target import load_target_parts
from launch.cli import main
from launch.config import SystemConfig
from launch.pretrain import PLATEAU_SHARE, Course, conclude, learn, pretrain
from launch.pretrain_sending import Record, Sender
from launch.rundir import LaunchError, RunDir
from learner.config import GateSettings, LearnerConfig, LearnerSettings, ReplaySettings
from learner.main import run as run_learner
from learner.session import LearningSession
from loadtest import sources
from loadtest.traffic import Prompt
from wire.environment import OPERATOR_TOKEN_VARIABLE
from wire.frames import frame_for
from wire.messages import encode
from wire.spec import CaptureSpec
from wire.store import DraftStore

sys.path.insert(0, str(Path(__file__).parent.parent / "drafter"))
sys.path.insert(0, str(Path(__file__).parent.parent / "server"))

from fake_engine import FakeEngine
from gateway_rig import OPERATOR_TOKEN, GatewayRig, running
from tiny_target import spec, target_dir

__all__ = ["spec", "target_dir"]

GATE_EVERY_S = 0.2
SETTINGS = LearnerSettings(gate=GateSettings(every_s=GATE_EVERY_S))
CHUNKS = [
    b'data: {"choices":[{"index":0,"delta":{"content":"yes"},"finish_reason":null}]}\n\n',
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n',
    b"data: [DONE]\n\n",
]


@pytest.fixture
def draft_vocab_size() -> int:
    return 48


@pytest.fixture
def traffic(tmp_path: Path) -> Path:
    """Forty questions, a fifth of which is the held-out part."""
    return questions(tmp_path, 40)


def questions(directory: Path, count: int) -> Path:
    path = directory / f"{count}-questions.jsonl"
    lines = [json.dumps({"messages": [{"role": "user", "content": f"question {number}"}]}) for number in range(count)]
    path.write_text("\n".join(lines))
    return path


def read(path: Path) -> list[Prompt]:
    return list(sources.load(str(path)).train)


class Captures:
    """What an engine sends of one answer: a language in which token t is followed by (3 t + 1) mod 40."""

    def __init__(self, endpoint: str, spec: CaptureSpec, head_VD: torch.Tensor) -> None:
        self._socket = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)
        self._spec, self._head_VD = spec, head_VD

    def send(self, request_id: str, first: int, *, prompt: int = 4, total: int = 24) -> None:
        tokens = [first % 40]
        while len(tokens) <= total:
            tokens.append((3 * tokens[-1] + 1) % 40)
        hidden = self._head_VD[tokens[1:]] * 2
        aux = torch.cat([self._head_VD[tokens[:-1]], hidden, hidden], dim=-1)
        spans = [capture_span(request_id=request_id, token_ids=tokens[:prompt], emitted_ids=[tokens[prompt]])]
        spans += [
            capture_span(request_id=request_id, first_position=at, token_ids=[tokens[at]], emitted_ids=[tokens[at + 1]])
            for at in range(prompt, total)
        ]
        step = capture_step(
            *spans,
            spec=self._spec,
            captured_at_s=time.time(),
            finished_ids=[request_id],
            tensors=[frame_for(tuple(rows.shape), self._spec.dtype) for rows in (aux, hidden)],
        )
        self._socket.send_multipart([encode(step), aux.numpy().tobytes(), hidden.numpy().tobytes()])

    def close(self) -> None:
        self._socket.close()


class Scene:
    """A system as `pretrain` finds it once it is ready."""

    def __init__(self, rig: GatewayRig, run_dir: RunDir, session: LearningSession) -> None:
        self.rig, self.run_dir, self.session = rig, run_dir, session
        self.store = DraftStore(run_dir.state)

    def asked(self) -> list[str]:
        return [body["messages"][-1]["content"] for body in self.rig.engine.bodies]

    def sender(self, record: Record) -> Sender:
        return Sender(self.rig.public_url, "fake", record, concurrency=2)

    async def learn(self, sender: Sender, course: Course) -> list[tuple[str, float]]:
        reports: list[tuple[str, float]] = []
        await asyncio.to_thread(learn, self.run_dir, sender, course, lambda what, share: reports.append((what, share)))
        return reports


@asynccontextmanager
async def scene(tmp_path: Path, spec: CaptureSpec, target_dir: Path, **replay: Any) -> AsyncIterator[Scene]:
    run_dir = RunDir(tmp_path / "state")
    run_dir.create()
    store = DraftStore(run_dir.state)
    version = create_random_draft(store, spec, target_dir)
    store.set_active(version)
    store.set_floor(version)
    captures: list[Captures] = []

    def captured(engines: list[FakeEngine]) -> None:
        engine = engines[0]
        engine.spec, engine.chunks = spec, CHUNKS
        answer = engine.on_completion

        async def answer_and_capture(request: web.Request) -> web.StreamResponse:
            response = await answer(request)
            if response.status == 200:
                number = int(engine.bodies[-1]["messages"][-1]["content"].rsplit(" ", 1)[1])
                captures[0].send(f"q{number}", number)
            return response

        engine.on_completion = answer_and_capture  # type: ignore[method-assign]

    async with running(run_dir.state, before=captured) as rig:
        settings = {
            "nice": 0,
            "replay": {"holdout_share": 0.3, "max_passes": 20} | replay,
            "train": {"muon_rate": 0.05, "bfloat16": False, "batch_tokens": 60, "average_decay": 0.9},
            "gate": {"every_s": GATE_EVERY_S, "num_resamples": 200},
        }
        config = LearnerConfig.build(
            {
                "learner": settings,
                "target_dir": str(target_dir),
                "state_dir": str(run_dir.state),
                "capture_endpoint": "tcp://127.0.0.1:*",
                "admin_url": rig.admin_url,
                "num_speculative_tokens": 3,
            },
            source="test",
        )
        session = await asyncio.to_thread(LearningSession, config, version)
        captures.append(Captures(session.receiver.endpoint, spec, load_target_parts(target_dir).head_VD))
        run_dir.write_system({"pid": 1, "pid_created_at_s": 0.0, "gateway_url": rig.public_url, "admin_url": rig.admin_url})
        stopping = threading.Event()
        thread = threading.Thread(target=run_learner, args=(session, stopping))
        thread.start()
        try:
            yield Scene(rig, run_dir, session)
        finally:
            stopping.set()
            await asyncio.to_thread(thread.join)
            await asyncio.to_thread(session.close)
            captures[0].close()


@pytest.fixture(autouse=True)
def _operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OPERATOR_TOKEN_VARIABLE, OPERATOR_TOKEN)


def test_answers_to_a_file_become_a_better_draft_that_is_active_and_the_floor(
    tmp_path: Path, spec: CaptureSpec, target_dir: Path
) -> None:
    """Of so many questions that those held out suffice as evidence, even where all are answered before the first step."""
    traffic = questions(tmp_path, 120)

    async def scenario() -> None:
        async with scene(tmp_path, spec, target_dir) as system:
            record = Record(tmp_path / "state" / "pretrain", read(traffic))
            course = Course(record, 20_000, SETTINGS)
            reports = await system.learn(system.sender(record), course)
            assert course.reason, "this language is soon learned, so a plateau may end it before the budget does"
            assert course.num_spent >= PLATEAU_SHARE * 20_000
            assert sorted(system.asked()) == sorted(prompt.messages[-1]["content"] for prompt in read(traffic))
            assert "0 prompts left" in reports[-1][0]
            assert reports[-1][1] == course.share
            said: list[str] = []
            assert conclude(system.store, course.reason, said.append) == 0
            active = system.store.active()
            assert active is not None
            assert active > 0
            assert system.store.floor() == active
            gate = system.store.manifest(active).gate
            assert gate is not None
            assert gate.candidate_al > gate.incumbent_al
            assert f"draft {active} is active and the floor" in said[0]

    asyncio.run(scenario())


def test_what_was_interrupted_goes_on_with_the_prompts_that_are_left(
    tmp_path: Path, traffic: Path, spec: CaptureSpec, target_dir: Path
) -> None:
    async def scenario() -> None:
        async with scene(tmp_path, spec, target_dir) as system:
            directory = tmp_path / "state" / "pretrain"
            record = Record(directory, read(traffic))
            sender = system.sender(record)
            system.rig.engine.chunk_gate = asyncio.Event()
            sender.is_waiting = True
            sender.start()
            await asyncio.sleep(0.2)
            assert system.asked() == []
            sender.is_waiting = False
            await asyncio.to_thread(wait_until, lambda: len(system.asked()) == 2)
            sender.send_no_more()
            system.rig.engine.chunk_gate.set()
            await asyncio.to_thread(sender.stop)
            assert sender.num_left == len(read(traffic)) - 2
            again = Record(directory, read(traffic))
            assert again.num_done == 2
            resumed = system.sender(again)
            resumed.start()
            await asyncio.to_thread(wait_until, lambda: resumed.num_left == 0)
            resumed.stop()
            assert sorted(system.asked()) == sorted(prompt.messages[-1]["content"] for prompt in read(traffic))

    asyncio.run(scenario())


def test_a_prompt_that_is_refused_is_tried_again_and_then_given_up(
    tmp_path: Path, traffic: Path, spec: CaptureSpec, target_dir: Path
) -> None:
    async def scenario() -> None:
        async with scene(tmp_path, spec, target_dir) as system:
            system.rig.engine.answer = (400, {"error": {"message": "too long", "type": "x", "param": None, "code": 400}})
            record = Record(tmp_path / "state" / "pretrain", read(traffic)[:1])
            sender = system.sender(record)
            sender.start()
            await asyncio.to_thread(wait_until, lambda: sender.num_left == 0)
            sender.stop()
            assert sender.num_failed == 1
            assert len(system.asked()) == 3
            again = Record(tmp_path / "state" / "pretrain", read(traffic)[:1])
            assert (again.num_done, len(again.remaining)) == (0, 1)

    asyncio.run(scenario())


@pytest.mark.parametrize("error", [OSError("disk full"), RuntimeError("who knows")])
def test_a_sender_that_can_send_no_more_ends_it(
    tmp_path: Path, traffic: Path, spec: CaptureSpec, target_dir: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(_record: Record, _prompt_id: str) -> None:
        raise error

    monkeypatch.setattr(Record, "add", fail)

    async def scenario() -> None:
        async with scene(tmp_path, spec, target_dir) as system:
            record = Record(tmp_path / "state" / "pretrain", read(traffic))
            with pytest.raises(LaunchError, match=str(error)):
                await system.learn(system.sender(record), Course(record, 6000, SETTINGS))

    asyncio.run(scenario())


def test_a_system_that_is_gone_ends_it(tmp_path: Path, traffic: Path) -> None:
    run_dir = RunDir(tmp_path / "state")
    run_dir.create()
    run_dir.write_system(
        {"pid": 1, "pid_created_at_s": 0.0, "gateway_url": "http://127.0.0.1:9", "admin_url": "http://127.0.0.1:9"}
    )
    record = Record(tmp_path / "pretrain", [])
    with pytest.raises(LaunchError, match="does not answer"):
        learn(run_dir, Sender("http://127.0.0.1:9", "fake", record, 1), Course(record, 1, SETTINGS), lambda _what, _share: None)


@pytest.fixture
def record(tmp_path: Path, traffic: Path) -> Record:
    return Record(tmp_path / "pretrain", read(traffic))


def test_visits_before_the_first_run_do_not_count_and_those_of_an_interrupted_one_do(
    tmp_path: Path, traffic: Path, record: Record
) -> None:
    course = Course(record, 1000, SETTINGS)
    course.note(learner_report(num_tokens_seen=5000), num_left=9, now_s=0.0)
    course.note(learner_report(num_tokens_seen=5200), num_left=9, now_s=1.0)
    assert (course.num_spent, course.share) == (200, 0.2)
    resumed = Course(Record(tmp_path / "pretrain", read(traffic)), 1000, SETTINGS)
    resumed.note(learner_report(num_tokens_seen=5300), num_left=9, now_s=2.0)
    assert resumed.num_spent == 300


def test_a_used_up_budget_waits_for_the_gates_word(record: Record) -> None:
    course = Course(record, 100, SETTINGS)
    judged = {"accepted": 1, "rejected": 0}
    course.note(learner_report(num_gate_decisions=judged), num_left=9, now_s=0.0)
    over = learner_report(state="training", num_tokens_seen=120, num_gate_decisions=judged)
    assert not course.note(over, num_left=9, now_s=1.0)
    assert course.reason
    assert not course.note(over, num_left=9, now_s=2.0)
    again = learner_report(num_tokens_seen=140, num_gate_decisions={"accepted": 1, "rejected": 1})
    assert course.note(again, num_left=9, now_s=3.0)


def test_a_gate_that_never_speaks_is_not_waited_for(record: Record) -> None:
    course = Course(record, 100, SETTINGS)
    course.note(learner_report(), num_left=9, now_s=0.0)
    over = learner_report(state="training", num_tokens_seen=120)
    assert not course.note(over, num_left=9, now_s=1.0)
    assert course.note(over, num_left=9, now_s=100.0)


def test_answers_that_had_all_their_passes_end_it_once_the_gate_could_judge_them(record: Record) -> None:
    course = Course(record, 10**6, LearnerSettings(gate=GateSettings(every_s=20.0)))
    assert not course.note(learner_report(), num_left=1, now_s=0.0)
    assert not course.note(learner_report(), num_left=0, now_s=100.0)
    assert not course.note(learner_report(state="training"), num_left=0, now_s=120.0)
    assert not course.note(learner_report(), num_left=0, now_s=140.0)
    assert not course.note(learner_report(), num_left=0, now_s=160.0)
    assert course.note(learner_report(), num_left=0, now_s=171.0)
    assert course.reason == "every answer has had its passes"


def test_prompts_wait_while_answers_would_be_forgotten_before_they_had_their_passes(record: Record) -> None:
    course = Course(record, 10**6, LearnerSettings(replay=ReplaySettings(recent_tokens=1000, max_passes=4)))
    course.note(learner_report(state="training", num_tokens_seen=500), num_left=9, now_s=0.0)
    assert not course.is_behind(1000)
    assert course.is_behind(1001)
    course.note(learner_report(state="training", num_tokens_seen=500 + 4000), num_left=9, now_s=1.0)
    assert not course.is_behind(2000)
    assert course.is_behind(2001)
    course.note(learner_report(state="waiting", num_tokens_seen=500 + 4000), num_left=9, now_s=2.0)
    assert not course.is_behind(10**6)


def test_a_plateau_is_a_share_of_the_budget_without_a_better_draft(record: Record) -> None:
    course = Course(record, 1000, SETTINGS)
    step = int(PLATEAU_SHARE * 1000)

    def spend(num_tokens: int, num_accepted: int) -> str:
        decisions = {"accepted": num_accepted, "rejected": 3}
        course.note(learner_report(num_tokens_seen=num_tokens, num_gate_decisions=decisions), num_left=9, now_s=0.0)
        return course.reason

    assert spend(0, 0) == ""
    assert spend(step - 1, 0) == ""
    assert spend(step, 1) == ""
    assert spend(2 * step - 1, 1) == ""
    assert spend(2 * step, 1) == "no better draft in the last 250 token visits"


def test_a_record_cut_short_by_a_kill_is_read_as_far_as_it_goes(tmp_path: Path, traffic: Path, record: Record) -> None:
    prompts = read(traffic)
    record.begin(7)
    record.add(prompts[0].id)
    (path,) = (tmp_path / "pretrain").iterdir()
    path.write_text(path.read_text() + '\n{"answe')
    record.add(prompts[1].id)
    again = Record(tmp_path / "pretrain", prompts)
    assert again.num_tokens_before == 7
    assert [prompt.id for prompt in again.remaining] == [prompt.id for prompt in prompts[2:]]


def test_other_prompts_have_a_record_of_their_own(tmp_path: Path, traffic: Path, record: Record) -> None:
    record.add(read(traffic)[0].id)
    assert Record(tmp_path / "pretrain", read(traffic)[:5]).num_done == 0


def test_without_an_accepted_draft_the_floor_stays(tmp_path: Path, spec: CaptureSpec, target_dir: Path) -> None:
    store = DraftStore(tmp_path / "state")
    for _ in range(2):
        version = create_random_draft(store, spec, target_dir)
    store.set_floor(0)
    store.set_active(version)
    said: list[str] = []
    assert conclude(store, "every answer has had its passes", said.append) == 1
    assert store.floor() == 0
    assert "no draft passed the gate" in said[0]


def test_a_source_that_is_not_there_is_one_clear_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["draft", "pretrain", "--traffic", "nosuch"]) == 2
    assert "no source is called 'nosuch'; there are human_eval" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [{"num_tokens": 0}, {"concurrency": 0}])
def test_a_run_that_would_do_nothing_does_not_begin(wrong: dict[str, int]) -> None:
    settings = {"num_tokens": 1, "concurrency": 1} | wrong
    with pytest.raises(LaunchError, match="must be 1 or more"):
        pretrain(SystemConfig(), [], "absent.jsonl", say=print, **settings)
