"""CaptureReceiver: the PULL end of the capture channel. It checks what arrives and counts what it refuses.

A background thread moves messages into a bounded queue. When the queue is full the thread waits, the socket fills up to
its high-water mark, and the engine drops and counts: nothing is lost here without a number.

Shape letters: T rows, D hidden, X aux layers times D.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from dataclasses import dataclass

import torch
import zmq
from torch import Tensor

from drafter.draft import DTYPES
from wire.errors import FrameError, WireError
from wire.frames import check_capture
from wire.messages import CaptureStep, decode
from wire.spec import CaptureSpec

log = logging.getLogger(__name__)

_POLL_MS = 100
_MAX_MESSAGE_BYTES = 1 << 30
_LOGGED_REFUSALS = 5
_SOCKET_MESSAGES = 4
"""Waiting in the socket for each engine: it counts messages only, so the waiting is done in the queue, which counts bytes."""
_UNEXPECTED = "unexpected_error"
_PAUSE_AFTER_UNEXPECTED_S = 0.01


@dataclass(frozen=True)
class Received:
    """One checked message: aux_TX and hidden_TD in the spec's dtype, rows of all spans in order."""

    step: CaptureStep
    aux_TX: Tensor
    hidden_TD: Tensor
    received_at_s: float

    @property
    def num_bytes(self) -> int:
        return self.aux_TX.nbytes + self.hidden_TD.nbytes


class ReceivedQueue:
    """Messages from one thread to another, bounded in number and in bytes. One larger than all bytes passes when it is alone."""

    def __init__(self, max_messages: int, max_bytes: int) -> None:
        self._max_messages, self._max_bytes = max_messages, max_bytes
        self._changed = threading.Condition()
        self._waiting: list[Received] = []
        self._num_bytes = 0

    def put(self, received: Received, timeout_s: float) -> bool:
        """False where there was no room for it in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._has_room(received.num_bytes), timeout_s):
                return False
            self._waiting.append(received)
            self._num_bytes += received.num_bytes
            self._changed.notify_all()
            return True

    def take_all(self, timeout_s: float) -> list[Received]:
        """Everything that waits; waits up to `timeout_s` for a first one."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting, timeout_s)
            taken, self._waiting, self._num_bytes = self._waiting, [], 0
            self._changed.notify_all()
            return taken

    def _has_room(self, num_bytes: int) -> bool:
        fits = len(self._waiting) < self._max_messages and self._num_bytes + num_bytes <= self._max_bytes
        return fits or not self._waiting


class CaptureReceiver:
    """Owns the socket and its thread. `take` is for one consumer."""

    def __init__(self, endpoint: str, spec: CaptureSpec, *, max_queued_messages: int, max_queued_bytes: int) -> None:
        self.spec = spec
        self.num_received_rows = 0
        self.refused: Counter[str] = Counter()
        """Refused messages by error code; `unexpected_error` where no check foresaw it."""
        self.lag_s = 0.0
        self._queue = ReceivedQueue(max_queued_messages, max_queued_bytes)
        self._closing = threading.Event()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, _SOCKET_MESSAGES)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        self._socket.bind(endpoint)
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(target=self._run, name="capture-receiver", daemon=True)
        self._thread.start()

    @property
    def num_refused(self) -> int:
        return sum(self.refused.values())

    def take(self, timeout_s: float = 0.0) -> list[Received]:
        """All messages waiting; waits up to `timeout_s` for a first one."""
        return self._queue.take_all(timeout_s)

    def close(self) -> None:
        self._closing.set()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._receive_one()
            except WireError as error:
                self._refuse(error.code, error)
            except Exception as error:  # noqa: BLE001 -- outermost loop of a thread; no message may end learning
                self._refuse(_UNEXPECTED, error)
                self._closing.wait(_PAUSE_AFTER_UNEXPECTED_S)
        self._socket.close()

    def _receive_one(self) -> None:
        if not self._socket.poll(_POLL_MS):
            return
        received = self._read([frame.buffer for frame in self._socket.recv_multipart(copy=False)])
        self.num_received_rows += received.aux_TX.shape[0]
        self.lag_s = max(received.received_at_s - received.step.captured_at_s, 0.0)
        self._hand_over(received)

    def _read(self, frames: list[memoryview]) -> Received:
        message = decode(frames[0])
        if not isinstance(message, CaptureStep):
            raise WireError(f"the capture channel carries CaptureStep, got {type(message).__name__}")
        self.spec.require(message.spec, who=f"engine {message.engine_id}")
        buffers = check_capture(message, frames[1:])
        tensors = [_tensor(buffer, header.dtype, header.shape) for buffer, header in zip(buffers, message.tensors, strict=True)]
        if not all(bool(tensor.isfinite().all()) for tensor in tensors):
            raise FrameError(f"{message.engine_id} step {message.step}: captured rows are not finite")
        return Received(message, tensors[0], tensors[1], time.time())

    def _refuse(self, code: str, error: Exception) -> None:
        self.refused[code] += 1
        if self.refused[code] <= _LOGGED_REFUSALS:
            log.warning("refused a capture message (%d so far): %s: %s", self.num_refused, type(error).__name__, error)

    def _hand_over(self, received: Received) -> None:
        while not self._closing.is_set():
            if self._queue.put(received, timeout_s=_POLL_MS / 1000):
                return


def _tensor(buffer: memoryview, dtype: str, shape: tuple[int, ...]) -> Tensor:
    if buffer.nbytes == 0:
        return torch.empty(shape, dtype=DTYPES[dtype])
    return torch.frombuffer(bytearray(buffer), dtype=DTYPES[dtype]).view(shape)
