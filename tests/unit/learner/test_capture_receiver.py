from __future__ import annotations

import time

import msgspec
import pytest
import torch
import zmq
from waiting import DEADLINE_S, wait_until

from learner.receiver import CaptureReceiver
from wire.messages import encode

MESSAGE_ROWS = 4000
MESSAGE_BYTES = MESSAGE_ROWS * (48 + 16) * 4


@pytest.fixture
def receiver(spec):
    receiver = CaptureReceiver("tcp://127.0.0.1:*", spec, max_queued_messages=64, max_queued_bytes=1 << 28)
    yield receiver
    receiver.close()


def take(receiver: CaptureReceiver, count: int) -> list:
    taken: list = []
    wait_until(lambda: taken.extend(receiver.take(0.05)) or len(taken) >= count)
    return taken


def wait_for_refusals(receiver: CaptureReceiver, count: int) -> None:
    wait_until(lambda: receiver.num_refused >= count)


def test_rows_arrive_bit_for_bit(receiver, connect_engine, make_span, make_step, world):
    engine = connect_engine(receiver.endpoint)
    aux, hidden = world.rows([1, 4, 13])
    engine.send(make_step([make_span("r", 0, [1, 4, 13])], captured_at_s=time.time() - 1000.0), aux, hidden)
    (received,) = take(receiver, 1)
    assert torch.equal(received.aux_TX, aux)
    assert torch.equal(received.hidden_TD, hidden)
    assert receiver.num_received_rows == 3
    assert 1000.0 <= receiver.lag_s < 1000.0 + DEADLINE_S


def test_bad_messages_are_refused_and_counted_and_good_ones_still_taken(
    receiver, connect_engine, make_span, make_step, spec, world
):
    engine = connect_engine(receiver.endpoint)
    aux, hidden = world.rows([1])
    step = make_step([make_span("r", 0, [1])])
    other = make_step([make_span("r", 0, [1])], spec=msgspec.structs.replace(spec, target_revision="other"))
    engine.send_raw([b"garbage"])
    engine.send_raw([encode(step), b"too short", hidden.numpy().tobytes()])
    engine.send_raw([encode(msgspec.structs.replace(step, schema_version=99))])
    engine.send(other, aux, hidden)
    engine.send(step, aux, hidden)
    assert len(take(receiver, 1)) == 1
    wait_for_refusals(receiver, 4)
    assert dict(receiver.refused) == {"wire_error": 1, "bad_frame": 1, "schema_mismatch": 1, "spec_mismatch": 1}


@pytest.mark.parametrize(("max_messages", "max_bytes"), [(4, 1 << 30), (1000, 4 * MESSAGE_BYTES)])
def test_a_full_learner_pushes_back_and_loses_nothing_it_took(spec, make_span, make_step, world, max_messages, max_bytes):
    receiver = CaptureReceiver("tcp://127.0.0.1:*", spec, max_queued_messages=max_messages, max_queued_bytes=max_bytes)
    socket = zmq.Context.instance().socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, 4)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(receiver.endpoint)
    tokens = [1] * MESSAGE_ROWS
    aux, hidden = world.rows(tokens)
    sent = dropped = 0

    def send_one() -> None:
        nonlocal sent, dropped
        step = make_step([make_span(f"r{sent}", 0, tokens)])
        try:
            socket.send_multipart([encode(step), aux.numpy().tobytes(), hidden.numpy().tobytes()], zmq.NOBLOCK)
            sent += 1
        except zmq.Again:
            dropped += 1

    wait_until(lambda: send_one() or receiver.num_received_rows >= 4 * MESSAGE_ROWS, "for the learner to be full")
    dropped = 0
    wait_until(lambda: send_one() or dropped >= 20, "for the way to the learner to be full")
    assert receiver.num_received_rows <= 5 * MESSAGE_ROWS
    assert len(take(receiver, sent)) == sent
    socket.close()
    receiver.close()


def test_a_message_larger_than_the_whole_budget_passes_alone(spec, connect_engine, make_span, make_step, world):
    receiver = CaptureReceiver("tcp://127.0.0.1:*", spec, max_queued_messages=64, max_queued_bytes=1)
    engine = connect_engine(receiver.endpoint)
    aux, hidden = world.rows([1, 4])
    for number in range(3):
        engine.send(make_step([make_span(f"r{number}", 0, [1, 4])]), aux, hidden)
    assert [received.step.spans[0].request_id for received in take(receiver, 3)] == ["r0", "r1", "r2"]
    receiver.close()


def test_empty_step_with_only_finished_ids_is_valid(receiver, connect_engine, make_step):
    engine = connect_engine(receiver.endpoint)
    engine.send(make_step([], finished=("r",)), torch.empty(0, 48), torch.empty(0, 16))
    (received,) = take(receiver, 1)
    assert received.step.finished_ids == ["r"]
    assert received.aux_TX.shape == (0, 48)


def test_rows_that_are_not_finite_are_refused(receiver, connect_engine, make_span, make_step, world):
    engine = connect_engine(receiver.endpoint)
    aux, hidden = world.rows([1])
    step = make_step([make_span("r", 0, [1])])
    engine.send(step, aux.clone().fill_(float("nan")), hidden)
    engine.send(step, aux, hidden.clone().fill_(float("inf")))
    engine.send(step, aux, hidden)
    assert len(take(receiver, 1)) == 1
    assert dict(receiver.refused) == {"bad_frame": 2}


def test_an_error_no_check_foresaw_is_counted_and_the_thread_lives(
    receiver, connect_engine, make_span, make_step, world, monkeypatch
):
    def fail(payload):
        raise MemoryError("unforeseen")

    engine = connect_engine(receiver.endpoint)
    aux, hidden = world.rows([1])
    step = make_step([make_span("r", 0, [1])])
    with monkeypatch.context() as patched:
        patched.setattr("learner.receiver.decode", fail)
        engine.send(step, aux, hidden)
        wait_for_refusals(receiver, 1)
    engine.send(step, aux, hidden)
    assert len(take(receiver, 1)) == 1
    assert dict(receiver.refused) == {"unexpected_error": 1}
