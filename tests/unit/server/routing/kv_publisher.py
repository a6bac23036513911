"""A publisher that speaks vLLM's KV event protocol over real sockets, and can lose messages on purpose."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from waiting import DEADLINE_S

END = (-1).to_bytes(8, "big", signed=True)


def stored(hashes: list[int], parent: int | None, tokens: list[int], block: int, **more: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": block,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        **more,
    }


def removed(hashes: list[int], **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", **more}


CLEARED = {"type": "AllBlocksCleared"}


class KvPublisher:
    """One engine process: PUB connects to the gateway, ROUTER repeats."""

    def __init__(self, context: zmq.asyncio.Context, engine_id: str, endpoint: str, replay_address: str | None = None) -> None:
        self._topic = f"kv@{engine_id}".encode()
        self._router = context.socket(zmq.ROUTER)
        self._router.linger = 0
        self.replay_address = replay_address or "tcp://127.0.0.1:*"
        self._bind()
        self._pub = context.socket(zmq.XPUB)  # A PUB that tells when it is subscribed to.
        self._pub.linger = 0
        self._pub.connect(endpoint)
        self.kept: list[tuple[int, bytes]] = []
        self.lost_in_replay: set[int] = set()
        """Numbers the next replay leaves out once."""
        self.num_replays = 0
        self.is_silent = False
        self._number = 0
        self._server = asyncio.create_task(self._serve())

    def _bind(self) -> None:
        """Take the address; a predecessor's socket leaves it a moment after it is closed."""
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            try:
                self._router.bind(self.replay_address)
                break
            except zmq.ZMQError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.01)
        self.replay_address = self._router.last_endpoint.decode()

    async def subscribed(self) -> None:
        """Wait for the gateway; before that, what is sent live is dropped."""
        async with asyncio.timeout(DEADLINE_S):
            assert await self._pub.recv() == b"\x01kv@"

    async def publish(self, *events: Any, live: bool = True, keep: bool = True) -> None:
        payload = msgspec.msgpack.encode([time.time(), list(events), 0])
        await self.publish_raw(payload, live=live, keep=keep)

    async def publish_raw(self, payload: bytes, *, live: bool = True, keep: bool = True) -> None:
        number, self._number = self._number, self._number + 1
        if keep:
            self.kept.append((number, payload))
        if live:
            await self._pub.send_multipart([self._topic, number.to_bytes(8, "big"), payload])

    async def send_frames(self, frames: list[bytes]) -> None:
        await self._pub.send_multipart(frames)

    async def _serve(self) -> None:
        while True:
            client, _, first = await self._router.recv_multipart()
            self.num_replays += 1
            if self.is_silent:
                continue
            skipped, self.lost_in_replay = self.lost_in_replay, set()
            for number, payload in self.kept:
                if number >= int.from_bytes(first, "big") and number not in skipped:
                    await self._router.send_multipart([client, b"", self._topic, number.to_bytes(8, "big"), payload])
            await self._router.send_multipart([client, b"", b"", END, b""])

    async def close(self) -> None:
        self._server.cancel()
        with suppress(asyncio.CancelledError):
            await self._server
        self._pub.close()
        self._router.close()
