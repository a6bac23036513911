"""What the router keeps of requests, with the real gateway before fake engines."""

from __future__ import annotations

import asyncio
from pathlib import Path

from gateway_rig import GatewayRig, Reply, eventually, run, running


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
