"""The KV event channel over real sockets: order, gaps, replays, restarts, and messages nobody should trust."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import msgspec
import pytest
import zmq.asyncio
from kv_publisher import CLEARED, KvPublisher, removed, stored
from prometheus_client import CollectorRegistry

from server.routing import kv_events, replay
from server.routing.index import KvIndex
from server.routing.kv_events import KvListener
from server.routing.metrics import RoutingMetrics
from wire.kv_blocks import prompt_chain

BLOCK = 4
DEADLINE_S = 10.0


def block_tokens(number: int) -> list[int]:
    return [number] * BLOCK


def chain_of(*numbers: int) -> list[bytes]:
    return prompt_chain([token for number in numbers for token in block_tokens(number)], BLOCK, None)


class Rig:
    """A listener and its engines."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str) -> None:
        self.context = context
        self.endpoint = endpoint
        self.registry = CollectorRegistry()
        self.metrics = RoutingMetrics(self.registry)
        self.index = KvIndex(1 << 16)
        self.publishers: list[KvPublisher] = []
        self.listener: KvListener | None = None
        self._task: asyncio.Task[None] | None = None

    def publisher(self, engine_id: str = "e0", replay_address: str | None = None) -> KvPublisher:
        self.publishers.append(KvPublisher(self.context, engine_id, self.endpoint, replay_address))
        return self.publishers[-1]

    def listen(self, **replay_addresses: str) -> KvListener:
        self.listener = KvListener(self.context, self.endpoint, replay_addresses, self.index, self.metrics)
        self._task = asyncio.create_task(self.listener.listen())
        return self.listener

    def count(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"paceline_{name}_total", {"engine": "e0", **labels}) or 0.0

    def held(self, *numbers: int, engine_id: str = "e0") -> int:
        return self.index.count_held(engine_id, chain_of(*numbers))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.005)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        for publisher in self.publishers:
            await publisher.close()


@asynccontextmanager
async def make_rig() -> AsyncIterator[Rig]:
    context = zmq.asyncio.Context()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    rig = Rig(context, f"tcp://127.0.0.1:{port}")
    try:
        yield rig
    finally:
        await rig.close()
        context.destroy(linger=0)


def with_rig(test: Callable[[Rig], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        async def inside() -> None:
            async with make_rig() as rig:
                await test(rig)

        asyncio.run(inside())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


async def started(rig: Rig) -> KvPublisher:
    publisher = rig.publisher()
    rig.listen(e0=publisher.replay_address)
    await publisher.subscribed()
    await rig.until(lambda: rig.count("kv_replays", outcome="complete") == 1)  # a new engine is asked for all it has told
    return publisher


@with_rig
async def test_events_reach_the_index(rig: Rig) -> None:
    publisher = await started(rig)
    await publisher.publish(stored([1, 2], None, block_tokens(1) + block_tokens(2), BLOCK))
    await publisher.publish(stored([3], 2, block_tokens(3), BLOCK), removed([3]), stored([4], 2, block_tokens(4), BLOCK))
    await rig.until(lambda: rig.held(1, 2, 4) == 3)
    assert rig.held(1, 2, 3) == 2
    await publisher.publish(CLEARED)
    await rig.until(lambda: rig.index.num_blocks == 0)
    assert rig.count("kv_events", kind="stored") == 3
    assert rig.count("kv_events", kind="removed") == 1
    assert rig.count("kv_events", kind="cleared") == 1


@with_rig
async def test_what_was_published_before_the_gateway_came_is_asked_for(rig: Rig) -> None:
    publisher = rig.publisher()
    for number in range(5):
        await publisher.publish(stored([number], number - 1 if number else None, block_tokens(number), BLOCK), live=False)
    rig.listen(e0=publisher.replay_address)
    await rig.until(lambda: rig.held(0, 1, 2, 3, 4) == 5)
    await rig.until(lambda: rig.count("kv_replays", outcome="complete") == 1)
    assert rig.count("kv_event_gaps") == 0


@with_rig
async def test_a_gap_is_filled_from_the_first_missing_event_on(rig: Rig) -> None:
    publisher = await started(rig)
    await publisher.publish(stored([1], None, block_tokens(1), BLOCK), live=False)
    await publisher.publish(stored([2], 1, block_tokens(2), BLOCK), live=False)
    await publisher.publish(stored([3], 2, block_tokens(3), BLOCK))
    await rig.until(lambda: rig.held(1, 2, 3) == 3)
    assert rig.count("kv_events", kind="stored") == 3
    assert rig.count("kv_dropped_indexes") == 0
    assert rig.count("kv_event_gaps") == 1


@with_rig
async def test_events_nobody_has_any_more_cost_the_index(rig: Rig) -> None:
    publisher = await started(rig)
    await publisher.publish(stored([1], None, block_tokens(1), BLOCK))
    await rig.until(lambda: rig.held(1) == 1)
    await publisher.publish(removed([1]), live=False, keep=False)
    await publisher.publish(stored([5], None, block_tokens(5), BLOCK))
    await rig.until(lambda: rig.held(5) == 1)
    assert rig.held(1) == 0
    assert rig.count("kv_dropped_indexes") == 1
    await rig.until(lambda: rig.count("kv_replays", outcome="incomplete") == 1)


@with_rig
async def test_an_engine_that_does_not_repeat_costs_the_index(rig: Rig) -> None:
    publisher = await started(rig)
    await publisher.publish(stored([1], None, block_tokens(1), BLOCK))
    await rig.until(lambda: rig.held(1) == 1)
    publisher.is_silent = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "TIMEOUT_S", 0.2)
        await publisher.publish(removed([1]), live=False)
        await publisher.publish(stored([5], None, block_tokens(5), BLOCK))
        await rig.until(lambda: rig.held(5) == 1)
    assert rig.held(1) == 0
    assert rig.count("kv_dropped_indexes") == 1
    assert rig.count("kv_replays", outcome="unanswered") == 1


@with_rig
async def test_a_replay_that_loses_messages_is_asked_again(rig: Rig) -> None:
    publisher = rig.publisher()
    for number in range(40):
        await publisher.publish(stored([number], number - 1 if number else None, block_tokens(number), BLOCK), live=False)
    publisher.lost_in_replay = {20, 21}
    rig.listen(e0=publisher.replay_address)
    await rig.until(lambda: rig.held(*range(40)) == 40)
    assert publisher.num_replays == 2
    assert rig.count("kv_events", kind="stored") == 40
    assert rig.count("kv_dropped_indexes") == 0


@with_rig
async def test_a_long_replay_comes_whole(rig: Rig) -> None:
    publisher = rig.publisher()
    for number in range(3000):
        await publisher.publish(stored([number], number - 1 if number else None, block_tokens(number), BLOCK), live=False)
    rig.listen(e0=publisher.replay_address)
    await rig.until(lambda: rig.held(*range(3000)) == 3000)
    await rig.until(lambda: rig.count("kv_replays", outcome="complete") == 1)


@with_rig
async def test_numbers_that_begin_anew_are_another_process(rig: Rig) -> None:
    first = await started(rig)
    await first.publish(stored([1], None, block_tokens(1), BLOCK))
    await first.publish({"type": "Other"})
    await rig.until(lambda: rig.held(1) == 1 and rig.count("kv_events", kind="unknown") == 1)
    await first.close()
    rig.publishers.remove(first)
    second = rig.publisher(replay_address=first.replay_address)
    await second.subscribed()
    await second.publish(stored([7], None, block_tokens(7), BLOCK), live=False)
    await second.publish(stored([8], 7, block_tokens(8), BLOCK))
    await rig.until(lambda: rig.held(7, 8) == 2)
    assert rig.held(1) == 0
    assert rig.count("kv_dropped_indexes") == 0


@with_rig
async def test_a_new_epoch_clears_the_index_and_asks_for_everything(rig: Rig) -> None:
    first = await started(rig)
    await first.publish(stored([1], None, block_tokens(1), BLOCK))
    await rig.until(lambda: rig.held(1) == 1)
    await first.close()
    rig.publishers.remove(first)
    second = rig.publisher(replay_address=first.replay_address)
    await second.publish(stored([7], None, block_tokens(7), BLOCK), live=False)
    assert rig.listener is not None
    rig.listener.engine_restarted("e0")
    assert rig.held(1) == 0
    await rig.until(lambda: rig.held(7) == 1)
    assert rig.held(1) == 0


@with_rig
async def test_engines_do_not_disturb_one_another(rig: Rig) -> None:
    one, two = rig.publisher("e0"), rig.publisher("e1")
    for publisher in (one, two):
        await publisher.publish(stored([1], None, block_tokens(1), BLOCK), live=False)
    listener = rig.listen(e0=one.replay_address, e1=two.replay_address)
    await rig.until(lambda: rig.held(1) == 1 and rig.held(1, engine_id="e1") == 1)
    await two.publish(CLEARED, live=False)
    listener.engine_restarted("e1")
    await rig.until(lambda: two.num_replays == 2 and rig.count("kv_events", engine="e1", kind="cleared") == 1)
    assert rig.held(1) == 1
    assert rig.held(1, engine_id="e1") == 0


@with_rig
async def test_blocks_elsewhere_of_other_kinds_or_unknown_are_left_out_and_counted(rig: Rig) -> None:
    publisher = await started(rig)
    await publisher.publish(
        stored([1], None, block_tokens(1), BLOCK, medium="CPU"),
        removed([1], medium="STORAGE"),
        stored([2], None, block_tokens(2), BLOCK, group_idx=1),
        stored([3], None, block_tokens(3), BLOCK, kv_cache_spec_kind="sliding_window"),
        stored([9], 8, block_tokens(9), BLOCK),
        {"type": "BlockMoved", "block_hashes": [1]},
        stored([4], None, block_tokens(4), BLOCK, medium=None, group_idx=0, kv_cache_spec_kind="full_attention"),
    )
    await rig.until(lambda: rig.held(4) == 1)
    assert rig.index.num_blocks == 1
    assert rig.count("kv_events", kind="elsewhere") == 2
    assert rig.count("kv_events", kind="partial") == 2
    assert rig.count("kv_events", kind="orphan") == 1
    assert rig.count("kv_events", kind="unknown") == 1


@with_rig
async def test_a_message_that_cannot_be_read_costs_the_index_but_not_the_channel(rig: Rig) -> None:
    publisher = await started(rig)
    await publisher.publish(stored([1], None, block_tokens(1), BLOCK))
    await publisher.publish_raw(b"\xff\xff")
    await publisher.publish(stored([2], None, block_tokens(2), BLOCK))
    await rig.until(lambda: rig.held(2) == 1)
    assert rig.held(1) == 0
    assert rig.count("bad_kv_events") == 1
    for event in (
        stored([1, 2], None, block_tokens(1), BLOCK),
        stored([1], None, [-1] * BLOCK, BLOCK),
        stored([1], None, block_tokens(1), BLOCK, extra_keys=[None, None]),
        {"type": "BlockStored", "block_hashes": [1]},
    ):
        await publisher.publish(event)
    await rig.until(lambda: rig.count("bad_kv_events") == 5)
    assert rig.index.num_blocks == 0


@with_rig
async def test_a_batch_nested_too_deeply_does_not_end_the_channel(rig: Rig) -> None:
    publisher = await started(rig)
    await publisher.send_frames([b"kv@e0", b"\0" * 8, b"\x91" * 100_000 + b"\xc0"])
    event = msgspec.msgpack.encode(stored([1], None, block_tokens(1), BLOCK))
    deep = b"\x92\xcb" + bytes(8) + b"\x91" + bytes([event[0] + 1]) + event[1:] + b"\xa4more" + b"\x91" * 100_000 + b"\xc0"
    await publisher.send_frames([b"kv@e0", b"\0" * 7 + b"\1", deep])
    await rig.until(lambda: rig.count("bad_kv_events") == 2)
    await publisher.send_frames([b"kv@e0", b"\0" * 7 + b"\2", msgspec.msgpack.encode([0.0, [msgspec.Raw(event)]])])
    await rig.until(lambda: rig.held(1) == 1)


@with_rig
async def test_odd_frames_are_counted_and_ignored(rig: Rig) -> None:
    publisher = await started(rig)
    await publisher.send_frames([b"kv@e0", b"\0" * 8])
    await publisher.send_frames([b"kv@nobody", b"\0" * 8, b""])
    await publisher.send_frames([b"kv@e0", b"\0" * 7, b""])
    await publisher.publish(stored([2], None, block_tokens(2), BLOCK))
    await rig.until(lambda: rig.held(2) == 1)
    assert rig.count("bad_kv_events", engine="unknown") == 2
    assert rig.count("bad_kv_events") == 1


@with_rig
async def test_salts_and_loras_reach_the_names_of_blocks(rig: Rig) -> None:
    publisher = await started(rig)
    tokens = block_tokens(1) + block_tokens(2)
    await publisher.publish(stored([1, 2], None, tokens, BLOCK, extra_keys=[["tenant"], None]))
    await publisher.publish(stored([3, 4], None, tokens, BLOCK, lora_name="l", extra_keys=[["l"], ["l"]]))
    await publisher.publish(stored([5], None, block_tokens(5), BLOCK))
    await rig.until(lambda: rig.held(5) == 1)
    assert rig.index.count_held("e0", prompt_chain(tokens, BLOCK, "tenant")) == 2
    assert rig.held(1, 2) == 0
    assert rig.index.count_held("e0", prompt_chain(tokens, BLOCK, "l")) == 0


@with_rig
async def test_after_a_loss_an_engine_is_asked_to_tell_what_it_reuses(rig: Rig) -> None:
    publisher = await started(rig)
    listener = rig.listener
    assert listener is not None
    await publisher.publish(stored([1, 2], None, block_tokens(1) + block_tokens(2), BLOCK))
    await rig.until(lambda: rig.held(1, 2) == 2)
    assert not listener.wants_full_report("e0")
    await publisher.publish(removed([9]), live=False, keep=False)
    await publisher.publish(stored([3], 2, block_tokens(3), BLOCK))
    await rig.until(lambda: rig.count("kv_events", kind="orphan") == 1)
    assert rig.held(1, 2, 3) == 0
    assert listener.wants_full_report("e0")
    # Two requests reuse the blocks; then the engine gives them up, one after the other.
    repeated = stored([1, 2, 3], None, block_tokens(1) + block_tokens(2) + block_tokens(3), BLOCK)
    await publisher.publish(repeated, repeated, stored([4], 3, block_tokens(4), BLOCK))
    await rig.until(lambda: rig.held(1, 2, 3, 4) == 4)
    await publisher.publish(removed([3]))
    await rig.until(lambda: rig.held(1, 2, 3, 4) == 2)
    await publisher.publish(CLEARED)
    await rig.until(lambda: not listener.wants_full_report("e0"))


@with_rig
async def test_reports_are_wanted_until_nothing_is_found_missing(rig: Rig) -> None:
    publisher = await started(rig)
    listener = rig.listener
    assert listener is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_events, "REPORT_S", 0.05)
        await publisher.publish(stored([1], 0, block_tokens(1), BLOCK))
        await rig.until(lambda: rig.count("kv_events", kind="orphan") == 1)
        assert not listener.wants_full_report("e0"), "nothing was lost"
        await publisher.publish(removed([9]), live=False, keep=False)
        await publisher.publish(stored([1], None, block_tokens(1), BLOCK))
        await rig.until(lambda: rig.held(1) == 1)
        await rig.until(lambda: not listener.wants_full_report("e0"))
    await publisher.publish(stored([5], 4, block_tokens(5), BLOCK))
    await rig.until(lambda: listener.wants_full_report("e0"))
    listener.engine_restarted("e0")
    assert not listener.wants_full_report("e0")


@with_rig
async def test_another_target_in_the_same_process_leaves_nothing_of_the_old_ones_kv(rig: Rig) -> None:
    publisher = await started(rig)
    assert rig.listener is not None
    await publisher.publish(stored([1, 2], None, block_tokens(1) + block_tokens(2), BLOCK))
    await rig.until(lambda: rig.held(1, 2) == 2)
    await rig.until(lambda: publisher.num_replays == 1)
    rig.listener.engine_changed("e0")
    assert rig.held(1, 2) == 0
    await publisher.publish(stored([3], None, block_tokens(3), BLOCK))
    await rig.until(lambda: rig.held(3) == 1)
    assert rig.held(1, 2) == 0
    assert publisher.num_replays == 1
    assert rig.count("kv_event_gaps") == 0
    # What is missed from here on is asked for as ever, and nothing before it.
    await publisher.publish(stored([4], 3, block_tokens(4), BLOCK), live=False)
    await publisher.publish(stored([5], 4, block_tokens(5), BLOCK))
    await rig.until(lambda: rig.held(3, 4, 5) == 3)
    assert rig.held(1, 2) == 0
