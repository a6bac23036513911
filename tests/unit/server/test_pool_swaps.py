"""Swaps over prefill and decode pools: one draft everywhere or nowhere, prefill engines first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fake_engine import FakeEngine
from gateway_rig import GatewayRig, eventually, publish, run, running

from server.config import PoolKind

KINDS: tuple[PoolKind, ...] = ("decode", "prefill", "combined")
"""Of engine-0, engine-1 and engine-2."""
DECODE, PREFILL, COMBINED = range(3)
SKEW = "paceline_draft_version_skew"


class CommitOrder:
    """Commits in the order the engines received them, as `<engine id> commit <version>`."""

    def __init__(self) -> None:
        self.commits: list[str] = []

    def watch(self, engines: list[FakeEngine]) -> None:
        for engine in engines:
            engine.calls = _Calls(engine.id, self.commits)


class _Calls(list[str]):
    def __init__(self, engine_id: str, commits: list[str]) -> None:
        self._engine_id, self._commits = engine_id, commits

    def append(self, call: str) -> None:
        super().append(call)
        if call.startswith("commit"):
            self._commits.append(f"{self._engine_id} {call}")


@asynccontextmanager
async def running_pools(tmp_path: Path) -> AsyncIterator[tuple[GatewayRig, CommitOrder]]:
    """A gateway over the three pools, draft 1 published and not yet active."""
    order = CommitOrder()
    async with running(tmp_path, num_engines=3, before=order.watch) as rig:
        for engine, kind in zip(rig.gateway.fleet.engines, KINDS, strict=True):
            engine.kind = kind
        publish(tmp_path)
        yield rig, order


def commits(version: int, *engines: int) -> list[str]:
    return [f"engine-{index} commit {version}" for index in engines]


def test_prefill_engines_commit_before_those_that_pull_their_kv(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_pools(tmp_path) as (rig, order):
            assert (await rig.activate(1, 0)).status == 200
            assert order.commits == commits(1, PREFILL, DECODE, COMBINED)
            assert [engine.draft_version for engine in rig.engines] == [1, 1, 1]
            assert await rig.metric(SKEW) == 0

    run(scenario())


def test_an_engine_that_refuses_sends_every_pool_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_pools(tmp_path) as (rig, order):
            rig.engines[COMBINED].refuse_commit[1] = "worker is out of memory"
            assert (await rig.activate(1, 0)).code == "commit_failed"
            assert order.commits == commits(1, PREFILL, DECODE, COMBINED) + commits(0, PREFILL, DECODE)
            assert [engine.draft_version for engine in rig.engines] == [0, 0, 0]
            assert (await rig.status())["active_version"] == 0
            assert await rig.metric(SKEW) == 0

    run(scenario())


def test_a_draft_that_one_pool_cannot_stage_is_committed_nowhere(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_pools(tmp_path) as (rig, order):
            rig.engines[PREFILL].refuse_stage[1] = "tensor fc.weight is [3, 3]"
            assert (await rig.activate(1, 0)).status == 422
            assert order.commits == []
            assert [engine.draft_version for engine in rig.engines] == [0, 0, 0]

    run(scenario())


def test_the_skew_tells_of_a_pool_that_lags(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_pools(tmp_path) as (rig, order):
            assert await rig.metric(SKEW) == 0
            rig.engines[DECODE].hang_commit = True
            activation = asyncio.create_task(rig.activate(1, 0))
            await eventually(lambda: order.commits == commits(1, PREFILL, DECODE))
            assert await rig.metric(SKEW) == 1
            await rig.engines[DECODE].stop()
            assert (await activation).code == "commit_failed"
            assert await rig.metric(SKEW) == 0

    run(scenario())
