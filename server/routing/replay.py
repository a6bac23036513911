"""The asking side of vLLM's KV event replay.

Request to the engine's ROUTER: `["", first number]`. Answers: `["", topic, number, batch]` each, then one whose number
is -1. The engine's publisher thread serves a replay between two messages, so an idle engine answers within 0.1 s.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import zmq
import zmq.asyncio

from server.routing.kv_messages import decode_number
from wire.errors import WireError

TIMEOUT_S = 5.0
"""Longest wait for each answer."""
MAX_QUEUED_ANSWERS = 20_000
"""Above the 10000 messages an engine keeps."""
MAX_ANSWER_BYTES = 16 * 1024 * 1024
_END = (-1).to_bytes(8, "big", signed=True)


class ReplaySocket:
    """Where one engine repeats its events; an empty address: nowhere."""

    def __init__(self, context: zmq.asyncio.Context, address: str) -> None:
        self._context = context
        self._address = address

    async def ask(self, first_number: int) -> AsyncGenerator[tuple[int, bytes], None]:
        """Numbers and batches from `first_number` on; raises TimeoutError or WireError."""
        if not self._address:
            raise TimeoutError
        with self._context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.rcvhwm = MAX_QUEUED_ANSWERS
            socket.maxmsgsize = MAX_ANSWER_BYTES
            socket.connect(self._address)
            await socket.send_multipart([b"", first_number.to_bytes(8, "big")])
            while True:
                async with asyncio.timeout(TIMEOUT_S):
                    frames = await socket.recv_multipart()
                if len(frames) != 4:
                    raise WireError(f"a replay answer has {len(frames)} frames, expected 4")
                if frames[2] == _END:
                    return
                yield decode_number(frames[2]), frames[3]
                await asyncio.sleep(0)  # A full socket never suspends, and requests must not wait for it.
