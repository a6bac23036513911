"""vLLM's KV event messages, as engine -> gateway: frames `[topic, number, batch]`.

The number counts up from 0 in each engine process; it is 8 bytes, big endian. The batch is msgpack.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from server.routing.index import EngineHash
from wire.errors import WireError

TOPIC_PREFIX = "kv@"
"""The rest of a topic is the engine's id."""

_TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_WHOLE_ATTENTION = (None, "full_attention", "mla_attention")


class EventBatch(Struct, array_like=True, frozen=True, gc=False):
    """Events of one engine step."""

    ts: float
    events: list[Raw]
    data_parallel_rank: int | None = None


class _Event(Struct, frozen=True, tag=True, gc=False):
    pass


class BlockStored(_Event, frozen=True):
    """Consecutive blocks are full and can be reused."""

    block_hashes: list[EngineHash]
    parent_block_hash: EngineHash | None
    token_ids: list[_TokenId]
    block_size: Annotated[int, Meta(ge=1)]
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    """One entry a block: what else its hash depends on, a cache salt in the first block for one."""
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None

    @property
    def is_plain(self) -> bool:
        """Whether a prompt's tokens decide alone which of these blocks it can reuse, one after another."""
        return self.kv_cache_spec_kind in _WHOLE_ATTENTION and not self.group_idx

    def keys(self) -> list[Any]:
        """One entry a block. A LoRA's name is told apart from a salt that reads the same."""
        extra_keys = self.extra_keys or [None] * len(self.block_hashes)
        return [["lora", self.lora_name, keys] for keys in extra_keys] if self.lora_name is not None else list(extra_keys)


class BlockRemoved(_Event, frozen=True):
    """Blocks are gone."""

    block_hashes: list[EngineHash]
    medium: str | None = None
    group_idx: int | None = None

    @property
    def is_plain(self) -> bool:
        """As of BlockStored; blocks of other kinds of attention were never entered."""
        return not self.group_idx


class AllBlocksCleared(_Event, frozen=True):
    """Nothing is held any more."""


class _Kind(Struct, frozen=True):
    type: str


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared

_KNOWN = {kind.__name__ for kind in (BlockStored, BlockRemoved, AllBlocksCleared)}
_batch_decoder = msgspec.msgpack.Decoder(EventBatch)
_event_decoder = msgspec.msgpack.Decoder(KvEvent)
_kind_decoder = msgspec.msgpack.Decoder(_Kind)


def engine_of(topic: bytes) -> str:
    """The id of the engine that speaks; raises WireError."""
    text = topic.decode(errors="replace")
    if not text.startswith(TOPIC_PREFIX):
        raise WireError(f"topic {text[:80]!r} does not begin with {TOPIC_PREFIX!r}; check the engine's kv-events-config")
    return text.removeprefix(TOPIC_PREFIX)


def decode_number(frame: bytes) -> int:
    """Raises WireError."""
    if len(frame) != 8:
        raise WireError(f"the number of a KV event message has {len(frame)} bytes, expected 8")
    return int.from_bytes(frame, "big")


def decode_events(payload: bytes) -> list[KvEvent | None]:
    """The events of a batch, None for kinds this version does not know; raises WireError for malformed ones, RecursionError for
    ones nested too deeply."""
    try:
        return [_decode_event(raw) for raw in _batch_decoder.decode(payload).events]
    except msgspec.DecodeError as error:
        raise WireError(f"a KV event message cannot be read: {error}") from None


def _decode_event(raw: Raw) -> KvEvent | None:
    try:
        event = _event_decoder.decode(raw)
    except msgspec.ValidationError:
        if _kind_decoder.decode(raw).type in _KNOWN:
            raise
        return None
    if isinstance(event, BlockStored) and event.is_plain:
        num_tokens, num_keys = len(event.token_ids), len(event.keys())
        if num_tokens != len(event.block_hashes) * event.block_size or num_keys != len(event.block_hashes):
            raise WireError(
                f"BlockStored names {len(event.block_hashes)} blocks of {event.block_size} tokens, "
                f"with {num_tokens} tokens and {num_keys} entries of extra keys"
            )
    return event
