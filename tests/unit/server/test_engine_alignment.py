"""Engines that come back while a swap, or the return of another engine, is under way."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from fake_engine import FakeEngine
from gateway_rig import eventually, publish, run, running

from server.fleet import Engine


@asynccontextmanager
async def a_swap_without(tmp_path: Path) -> AsyncIterator[tuple[FakeEngine, Engine, int, Callable[[], Awaitable[None]]]]:
    """A swap that waits for one engine's stage while another is away: the absent one, the gateway's view of it, the version,
    and what lets the swap end."""
    async with running(tmp_path, num_engines=2) as rig:
        other, late = rig.engines
        known = rig.gateway.fleet.engines[1]
        await late.stop()
        await eventually(lambda: not known.ready)
        other.stage_gate = gate = asyncio.Event()
        version = publish(tmp_path, parent=0)
        swap = asyncio.create_task(rig.activate(version, 0))
        await eventually(lambda: f"stage {version}" in other.calls)

        async def finish_swap() -> None:
            gate.set()
            assert (await swap).status == 200

        yield late, known, version, finish_swap


def test_an_engine_that_restarts_while_it_waits_for_a_swap_is_checked_anew(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_swap_without(tmp_path) as (late, known, version, finish_swap):
            await late.restart(draft_version=0)
            await eventually(lambda: known.epoch == late.epoch)
            late.epoch, late.parts = uuid.uuid4().hex, ["weights"]
            await finish_swap()
            await eventually(lambda: "capture" in known.reason)
            assert not known.ready
            late.parts = ["capture", "weights"]
            await eventually(lambda: known.ready and known.epoch == late.epoch and late.draft_version == version)

    run(scenario())


def test_an_engine_that_a_swap_moves_serves_again_at_once_after_a_blip(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, num_engines=2) as rig:
            known, slow = rig.gateway.fleet.engines[0], rig.engines[1]
            slow.stage_gate = asyncio.Event()
            version = publish(tmp_path, parent=0)
            swap = asyncio.create_task(rig.activate(version, 0))
            await eventually(lambda: f"stage {version}" in slow.calls)
            known.suspect("failed a request")
            await eventually(lambda: known.ready)
            assert rig.gateway.swap.is_busy
            slow.stage_gate.set()
            assert (await swap).status == 200
            await eventually(lambda: not known.needs_sync)
            assert [engine.draft_version for engine in rig.engines] == [version] * 2
            assert [engine.draft_version for engine in rig.gateway.fleet.engines] == [version] * 2

    run(scenario())


def test_an_engine_with_the_active_draft_does_not_wait_for_the_return_of_another(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, num_engines=2) as rig:
            version = publish(tmp_path, parent=0)
            assert (await rig.activate(version, 0)).status == 200
            (known, returning), slow = rig.gateway.fleet.engines, rig.engines[1]
            slow.stage_gate = asyncio.Event()
            await slow.restart(draft_version=0)
            returning.request_sync()
            await eventually(lambda: slow.calls.count(f"stage {version}") == 2)
            known.suspect("failed a request")
            await eventually(lambda: known.ready)
            assert rig.gateway.swap.is_busy
            slow.stage_gate.set()
            await eventually(lambda: returning.ready and returning.draft_version == version)

    run(scenario())


def test_an_engine_that_no_swap_moves_waits_until_it_is_settled(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_swap_without(tmp_path) as (late, known, version, finish_swap):
            num_calls = len(late.calls)
            await late.start()
            await eventually(lambda: len(late.calls) > num_calls)
            await asyncio.sleep(0.1)
            assert not known.ready
            await finish_swap()
            await eventually(lambda: known.ready and late.draft_version == version)

    run(scenario())
