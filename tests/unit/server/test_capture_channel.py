from __future__ import annotations

import gc
import threading
import time
from pathlib import Path

import pytest
import torch
import zmq
from sample_messages import capture_span, capture_step, engine_stats
from waiting import wait_until

from server.config import CaptureSettings, EnginePartsConfig
from server.engine.channel import QUEUE_FULL, SEND_FAILED, CaptureChannel, CapturedStep, describe
from wire.errors import ConfigError
from wire.messages import EngineStats, decode

ROWS, WIDTH = 4, 256


def captured_step(*, num_rows: int = ROWS) -> CapturedStep:
    tensors = (torch.zeros(num_rows, 3 * WIDTH), torch.zeros(num_rows, WIDTH))
    span = capture_span(token_ids=[1] * num_rows, emitted_ids=[2])
    message = capture_step(span, tensors=describe(tensors))
    return CapturedStep(message, tensors)


def config(tmp_path: Path, **capture: int) -> EnginePartsConfig:
    return EnginePartsConfig(
        engine_id="e", state_dir=tmp_path, target_dir=tmp_path, draft_vocab_size=8, aux_layer_ids=None,
        capture=CaptureSettings(**capture), capture_endpoint=f"ipc://{tmp_path}/capture", events_endpoint=f"ipc://{tmp_path}/events",
    )  # fmt: skip


def stats(num_captured_rows: int, num_dropped_rows: dict[str, int]) -> EngineStats:
    return engine_stats(sent_at_s=time.time(), num_captured_rows=num_captured_rows, num_dropped_rows=num_dropped_rows)


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_an_endpoint_that_is_taken_is_told_and_nothing_stays_open(tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as other:
        port = other.bind_to_random_port("tcp://127.0.0.1")
        taken = config(tmp_path).model_copy(update={"events_endpoint": f"tcp://127.0.0.1:{port}"})
        with pytest.raises(ConfigError, match="is the port taken"):
            CaptureChannel(taken, stats)
    wait_until(lambda: all(thread.name != "paceline-capture" for thread in threading.enumerate()))
    gc.collect()


def test_what_waits_is_bounded_in_bytes(tmp_path: Path) -> None:
    step = captured_step()
    num_bytes = sum(tensor.nbytes for tensor in step.tensors)
    channel = CaptureChannel(config(tmp_path, max_queued_bytes=num_bytes - 1), stats)
    try:
        channel.offer(step)
        assert channel.num_dropped_rows() == {QUEUE_FULL: ROWS}
    finally:
        channel.close()


def test_room_is_given_back_when_a_step_was_sent(tmp_path: Path) -> None:
    step = captured_step()
    num_bytes = sum(tensor.nbytes for tensor in step.tensors)
    with zmq.Context() as context, context.socket(zmq.PULL) as learner:
        learner.bind(f"ipc://{tmp_path}/capture")
        channel = CaptureChannel(config(tmp_path, max_queued_bytes=num_bytes), stats)
        try:
            num_offered = 0
            while not channel.num_captured_rows:  # until the connection is made
                channel.offer(step)
                num_offered += ROWS
                wait_until(lambda: channel.num_captured_rows + sum(channel.num_dropped_rows().values()) == num_offered)  # noqa: B023
            before, dropped = channel.num_captured_rows, channel.num_dropped_rows()
            for number in range(1, 6):
                channel.offer(step)
                wait_until(lambda number=number: channel.num_captured_rows == before + number * ROWS)
        finally:
            channel.close()
    assert channel.num_dropped_rows() == dropped


def test_statistics_go_on_after_a_step_that_cannot_be_sent(tmp_path: Path) -> None:
    bad = CapturedStep(captured_step().message, (torch.zeros(ROWS, WIDTH, device="meta"), torch.zeros(ROWS, WIDTH)))
    with zmq.Context() as context, context.socket(zmq.PULL) as learner, context.socket(zmq.SUB) as events:
        learner.bind(f"ipc://{tmp_path}/capture")
        events.subscribe(b"stats")
        channel = CaptureChannel(config(tmp_path), stats)
        try:
            events.connect(f"ipc://{tmp_path}/events")
            channel.offer(bad)
            wait_until(lambda: channel.num_dropped_rows() == {SEND_FAILED: ROWS})
            asked_s = time.time()
            while True:
                assert events.poll(120_000), "no statistics"
                message = decode(events.recv_multipart()[1])
                if isinstance(message, EngineStats) and message.sent_at_s > asked_s:
                    break
            assert message.num_dropped_rows == {SEND_FAILED: ROWS}
        finally:
            channel.close()
