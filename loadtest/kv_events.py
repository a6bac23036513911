"""KV events as an engine's vLLM publishes them, of blocks that nobody computed: what a gateway does with them costs the same."""

from __future__ import annotations

import itertools
import time
from collections import deque
from typing import Any

import msgspec
import zmq
import zmq.asyncio

CHAIN_BLOCKS = 100
"""Blocks of one prefix, told with one event, of what is held from the start."""


class KvEvents:
    """One engine's events, to the gateway that binds `endpoint`.

    The engine is full from the start with `num_blocks` blocks, so it gives one up for each that it stores.
    """

    def __init__(self, engine_id: str, endpoint: str, *, num_blocks: int, block_size_tokens: int) -> None:
        self._topic = f"kv@{engine_id}".encode()
        self._endpoint = endpoint
        self._num_blocks = num_blocks
        self._block_size_tokens = block_size_tokens
        self._names = itertools.count()
        """No two blocks hold the same tokens, so none is stored twice."""
        self._held: deque[int] = deque()
        self._num_sent = 0
        self._socket: zmq.asyncio.Socket | None = None
        """None while no gateway listens: what is sent then is lost, and it would have to forget all."""

    async def publish(self) -> None:
        """For as long as the engine runs; every gateway that comes is told of all that is held."""
        with zmq.asyncio.Context() as context, context.socket(zmq.XPUB) as socket:
            socket.linger = 0
            socket.sndhwm = 0
            socket.connect(self._endpoint)
            while True:
                is_listening = (await socket.recv())[:1] == b"\x01"
                self._socket, self._num_sent = None, 0
                self._held.clear()
                if is_listening:
                    self._socket = socket
                    while len(self._held) < self._num_blocks:
                        await self._send([self._stored(min(CHAIN_BLOCKS, self._num_blocks - len(self._held)))])

    async def store(self, num_tokens: int) -> None:
        """A prefix of that many tokens has been computed."""
        num_blocks = num_tokens // self._block_size_tokens
        if self._socket is None or num_blocks == 0:
            return
        events = [self._stored(num_blocks)]
        num_given_up = max(0, len(self._held) - self._num_blocks)
        if num_given_up:
            hashes = [self._held.popleft() for _ in range(num_given_up)]
            events.append({"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", "group_idx": 0})
        await self._send(events)

    def _stored(self, num_blocks: int) -> dict[str, Any]:
        hashes = list(itertools.islice(self._names, num_blocks))
        self._held += hashes
        first, num_tokens = hashes[0] * self._block_size_tokens, num_blocks * self._block_size_tokens
        return {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": None,
            "token_ids": list(range(first, first + num_tokens)),
            "block_size": self._block_size_tokens,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [None] * num_blocks,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }

    async def _send(self, events: list[dict[str, Any]]) -> None:
        assert self._socket is not None
        number, self._num_sent = self._num_sent, self._num_sent + 1
        batch = msgspec.msgpack.encode([time.time(), events, 0])
        await self._socket.send_multipart([self._topic, number.to_bytes(8, "big"), batch])
