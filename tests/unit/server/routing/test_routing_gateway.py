"""What the router keeps of requests, with the real gateway before fake engines."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from gateway_rig import GatewayRig, Reply, eventually, publish_target, run, running
from kv_publisher import KvPublisher, removed, stored


@asynccontextmanager
async def publishing(tmp_path: Path, **options: Any) -> AsyncIterator[tuple[GatewayRig, KvPublisher]]:
    """A gateway whose first engine publishes KV events that reach it."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        endpoint = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    async with running(tmp_path, kv_events_endpoint=endpoint, **options) as rig:
        publisher = KvPublisher(rig.gateway.context, "engine-0", endpoint)
        await publisher.subscribed()
        yield rig, publisher
        await publisher.close()


async def lose_one(rig: GatewayRig, publisher: KvPublisher) -> None:
    """Let an event go by that nobody can repeat, and one after it arrive."""
    await publisher.publish(removed([9]), live=False, keep=False)
    await publisher.publish(stored([1], None, list(range(16)), 16))
    await eventually(lambda: rig.gateway.kv_index.num_held("engine-0") == 1)


def num_queued_tokens(rig: GatewayRig) -> int:
    return sum(rig.gateway.router.costs.queued_tokens(engine) for engine in rig.gateway.fleet.engines)


def ask(rig: GatewayRig, num_tokens: int) -> asyncio.Task[Reply]:
    return asyncio.create_task(rig.complete(prompt=list(range(num_tokens)), stream=True))


def test_requests_without_a_first_byte_are_waited_for_until_their_client_leaves(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, num_engines=2) as rig:
            gate = asyncio.Event()
            for engine in rig.engines:
                engine.first_gate = gate
            asked = {num_tokens: ask(rig, num_tokens) for num_tokens in (101, 102, 103, 104, 105)}
            await eventually(lambda: num_queued_tokens(rig) == 515)
            for num_tokens in (105, 103):
                asked.pop(num_tokens).cancel()
            await eventually(lambda: num_queued_tokens(rig) == 101 + 102 + 104)
            asked[50] = ask(rig, 50)
            await eventually(lambda: num_queued_tokens(rig) == 101 + 102 + 104 + 50)
            gate.set()
            assert {reply.status for reply in await asyncio.gather(*asked.values())} == {200}
            assert num_queued_tokens(rig) == 0

    run(scenario())


def test_requests_every_engine_drops_are_not_waited_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, num_engines=2) as rig:
            for engine in rig.engines:
                engine.drop_connections = True
            assert (await ask(rig, 100)).status == 503
            assert num_queued_tokens(rig) == 0

    run(scenario())


def test_requests_have_an_engine_whose_index_was_lost_tell_what_they_reuse(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with publishing(tmp_path, kinds=("combined", "combined")) as (rig, publisher):
            await lose_one(rig, publisher)
            for _ in range(4):
                assert (await rig.complete({"X-Paceline-Tenant": "t"}, stream=True, vllm_xargs={"mine": 1})).status == 200
            lost, whole = (engine.bodies for engine in rig.engines)
            assert lost
            assert whole
            assert {body["vllm_xargs"].get("kv_cache_report_mode") for body in lost} == {"full"}
            assert {body["vllm_xargs"].get("kv_cache_report_mode") for body in whole} == {None}
            assert {body["vllm_xargs"]["mine"] for body in lost + whole} == {1}
            assert {body["vllm_xargs"]["paceline_tenant"] for body in lost + whole} == {"t"}

    run(scenario())


def test_prefill_engines_are_asked_for_it_too(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with publishing(tmp_path, kinds=("prefill", "decode")) as (rig, publisher):
            for engine in rig.gateway.fleet.engines:
                for _ in range(20):
                    seconds = 0.1 if engine.kind == "prefill" else 1000.0
                    rig.gateway.router.costs.learn_prefill(engine, seconds, 1000, 0)
            await lose_one(rig, publisher)
            assert (await ask(rig, 400)).headers["X-Paceline-Kv-Path"] == "remote_prefill"
            (prefill,), (decode,) = (engine.bodies for engine in rig.engines)
            assert prefill["vllm_xargs"]["kv_cache_report_mode"] == "full"
            assert prefill["vllm_xargs"]["paceline_capture"] == 0
            assert "kv_cache_report_mode" not in decode["vllm_xargs"]

    run(scenario())


def test_another_target_in_the_same_process_empties_the_index_and_events_go_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        settings = {"core_interval_s": 0.02}
        async with publishing(tmp_path, num_engines=2, settings=settings) as (rig, publisher):
            index, engine = rig.gateway.kv_index, rig.gateway.fleet.engines[0]
            await publisher.publish(stored([1, 2], None, list(range(32)), 16))
            await eventually(lambda: index.num_held("engine-0") == 2)
            rig.engine.target_version = 7
            await eventually(lambda: engine.target_version == 7)
            assert index.num_held("engine-0") == 0
            await publisher.publish(stored([3], None, list(range(16)), 16))
            await eventually(lambda: index.num_held("engine-0") == 1)
            assert not await rig.metric('paceline_kv_event_gaps_total{engine="engine-0"}'), "numbers do not begin anew"

    run(scenario())


def test_a_change_of_the_target_empties_the_index_and_events_go_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with publishing(tmp_path, num_engines=2) as (rig, publisher):
            index = rig.gateway.kv_index
            await publisher.publish(stored([1, 2], None, list(range(32)), 16))
            await eventually(lambda: index.num_held("engine-0") == 2)
            version = publish_target(tmp_path)
            assert (await rig.activate_target(version, 0)).status == 200
            assert index.num_held("engine-0") == 0
            await publisher.publish(stored([3], None, list(range(16)), 16))
            await eventually(lambda: index.num_held("engine-0") == 1)
            assert (await rig.roll_back_target(version)).status == 200
            assert index.num_held("engine-0") == 0

    run(scenario())
