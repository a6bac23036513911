"""CaptureChannel: the thread between the step and the network.

The step hands over a `CapturedStep` and goes on; this thread encodes and sends. Everything is bounded, nothing
blocks the step, every loss is counted by reason. Owns the PUSH socket to the learner and the PUB socket of events.

Shape letters: R rows, A aux layers, D target hidden size.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress

import msgspec
import torch
import zmq

from server.config import EnginePartsConfig
from server.engine.affinity import leave_compute_cores
from wire.errors import ConfigError
from wire.frames import frame_for
from wire.messages import TOPIC_STATS, TOPIC_STEP, CaptureStep, EngineStats, TensorFrame, encode

_STATS_PERIOD_S = 1.0
QUEUE_FULL = "queue_full"
CHANNEL_FULL = "channel_full"
NO_LEARNER = "no_learner"
SEND_FAILED = "send_failed"

_CLOSE_S = 5.0

logger = logging.getLogger(__name__)


StatsMaker = Callable[[int, dict[str, int]], EngineStats]
"""(rows sent, rows dropped by reason) -> the message."""


class CapturedStep(msgspec.Struct, frozen=True):
    """A message and its tensors in host memory: aux [R, A * D], hidden [R, D]."""

    message: CaptureStep
    tensors: tuple[torch.Tensor, torch.Tensor]


class CaptureChannel:
    """Starts its thread at once; `close` ends it. `make_stats` is called from the thread once a second.

    Raises ConfigError where an endpoint cannot be opened. The sockets belong to the thread: ZMQ's own threads inherit the
    mask of the one that makes the context, and must not land on the compute cores.
    """

    def __init__(self, config: EnginePartsConfig, make_stats: StatsMaker) -> None:
        self._config = config
        self._make_stats = make_stats
        self._queue: queue.Queue[CapturedStep | None] = queue.Queue(maxsize=config.capture.max_queued_steps)
        self._num_queued_bytes = 0
        self._lock = threading.Lock()
        self._num_dropped_rows: Counter[str] = Counter()
        self.num_captured_rows = 0
        opened: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(opened,), name="paceline-capture", daemon=True)
        self._thread.start()
        opened.result()

    def offer(self, step: CapturedStep) -> None:
        """Hand over a step; drops and counts it where the queue is full, in steps or in bytes. Never blocks."""
        num_bytes = _num_bytes(step)
        with self._lock:
            fits = self._num_queued_bytes + num_bytes <= self._config.capture.max_queued_bytes
            self._num_queued_bytes += num_bytes if fits else 0
        try:
            if not fits:
                raise queue.Full
            self._queue.put_nowait(step)
        except queue.Full:
            self._release(num_bytes if fits else 0)
            self._drop(step.message, QUEUE_FULL)

    def num_dropped_rows(self) -> dict[str, int]:
        with self._lock:
            return dict(self._num_dropped_rows)

    def close(self) -> None:
        """Send what is queued and end the thread."""
        with suppress(queue.Full):  # a thread that does not empty its queue is past being told
            self._queue.put(None, timeout=_CLOSE_S)
        self._thread.join(timeout=_CLOSE_S)

    def _release(self, num_bytes: int) -> None:
        with self._lock:
            self._num_queued_bytes -= num_bytes

    def _drop(self, message: CaptureStep, reason: str) -> None:
        with self._lock:
            self._num_dropped_rows[reason] += sum(span.num_rows for span in message.spans)

    def _run(self, opened: Future[None]) -> None:
        leave_compute_cores()
        context = zmq.Context()
        try:
            try:
                push, pub = context.socket(zmq.PUSH), context.socket(zmq.PUB)
                self._open(push, pub)
            except (zmq.ZMQError, OSError) as error:
                where = f"{self._config.capture_endpoint} or {self._config.events_endpoint}"
                opened.set_exception(ConfigError(f"cannot open {where}: {error}; is the port taken?"))
                return
            opened.set_result(None)
            self._send_until_closed(push, pub)
        finally:
            context.destroy(linger=0)

    def _send_until_closed(self, push: zmq.Socket[bytes], pub: zmq.Socket[bytes]) -> None:
        monitor = push.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        connected = False
        next_stats_s = time.monotonic()
        running = True
        while running:
            try:
                step = self._queue.get(timeout=max(next_stats_s - time.monotonic(), 0.0))
                running = step is not None
            except queue.Empty:
                step = None
            try:
                connected = _is_connected(monitor, connected)
                if step is not None:
                    self._release(_num_bytes(step))
                    self._send(step, push, pub, connected)
            except Exception:
                # The thread's outermost loop: one odd step must not end the statistics the canary lives on.
                logger.exception("a captured step could not be sent")
                if step is not None:
                    self._drop(step.message, SEND_FAILED)
            if time.monotonic() >= next_stats_s:
                next_stats_s = time.monotonic() + _STATS_PERIOD_S
                pub.send_multipart(
                    [TOPIC_STATS, encode(self._make_stats(self.num_captured_rows, self.num_dropped_rows()))], zmq.NOBLOCK
                )
        push.disable_monitor()
        monitor.close(linger=0)

    def _open(self, push: zmq.Socket[bytes], pub: zmq.Socket[bytes]) -> None:
        for socket in (push, pub):
            socket.sndhwm = self._config.capture.max_queued_messages
            socket.linger = 0
        push.immediate = True  # without a learner nothing is queued: its first message is fresh
        push.connect(self._config.capture_endpoint)
        pub.bind(self._config.events_endpoint)

    def _send(self, step: CapturedStep, push: zmq.Socket[bytes], pub: zmq.Socket[bytes], connected: bool) -> None:
        if step.message.spans:
            pub.send_multipart([TOPIC_STEP, encode(msgspec.structs.replace(step.message, tensors=[]))], zmq.NOBLOCK)
        try:
            push.send_multipart([encode(step.message), *_raw_frames(step.tensors)], zmq.NOBLOCK, copy=False)
        except zmq.Again:
            self._drop(step.message, CHANNEL_FULL if connected else NO_LEARNER)
        else:
            self.num_captured_rows += sum(span.num_rows for span in step.message.spans)


def _num_bytes(step: CapturedStep) -> int:
    return sum(tensor.nbytes for tensor in step.tensors)


def describe(tensors: Sequence[torch.Tensor]) -> list[TensorFrame]:
    """Frame headers of host tensors."""
    return [frame_for(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for tensor in tensors]


def _raw_frames(tensors: Sequence[torch.Tensor]) -> list[memoryview]:
    return [memoryview(tensor.reshape(-1).view(torch.uint8).numpy()) for tensor in tensors]


def _is_connected(monitor: zmq.Socket[bytes], connected: bool) -> bool:
    """Connection state after reading the socket monitor's pending events."""
    while monitor.poll(0):
        event = int.from_bytes(monitor.recv_multipart()[0][:2], "little")
        connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
    return connected
