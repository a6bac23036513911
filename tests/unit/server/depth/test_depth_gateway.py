"""Depth control in the gateway: what it sets on engines, and what it says of it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from fake_engine import FakeEngine
from gateway_rig import GatewayRig, eventually, run, running
from simulated_engine import step_s

from server.config import DepthSettings
from wire.messages import AcceptanceCount, StepTime

AUTO = DepthSettings(mode="auto")


class ColdTraffic:
    """One request at a time on an engine whose draft is never right; a second of it is told at every call."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self._num_steps: Counter[int] = Counter()
        self._num_proposed = [0, 0, 0]

    async def second(self) -> None:
        depth = self._engine.depths[0]
        self._num_steps[depth] += 25
        for position in range(depth):
            self._num_proposed[position] += 25
        self._engine.step_times = [
            StepTime(bucket=1, depth=each, num_steps=num_steps, total_s=num_steps * step_s(1, each))
            for each, num_steps in self._num_steps.items()
        ]
        self._engine.acceptance = [
            AcceptanceCount(
                draft_version=0,
                tenant="default",
                domain="default",
                num_verify_steps=self._num_proposed[0],
                proposed_per_position=list(self._num_proposed),
                accepted_per_position=[0, 0, 0],
            )
        ]
        await self._engine.publish_stats()

    async def until(self, rig: GatewayRig, depth: int) -> None:
        """Goes on until that K is in force for one request, no trial running."""

        async def settled() -> bool:
            await self.second()
            engine = await depth_of(rig)
            return bool(engine) and engine["trial"] is None and engine["is_applied"] and engine["buckets"][0]["depth"] == depth

        await eventually(settled)


async def depth_of(rig: GatewayRig) -> dict[str, Any]:
    """What the admin port says of the engine; empty while nothing is known."""
    engines = (await rig.admin("GET", "/admin/depth")).json["engines"]
    return engines[0] if engines else {}


def test_a_fixed_depth_is_watched_and_never_set(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as rig:
            traffic = ColdTraffic(rig.engine)

            async def watched() -> bool:
                await traffic.second()
                engine = await depth_of(rig)
                return bool(engine) and engine["buckets"][0]["options"][3]["num_steps"] >= 200

            await eventually(watched)
            assert (await rig.admin("GET", "/admin/depth")).json["mode"] == "fixed"
            assert "depth" not in rig.engine.calls
            assert rig.engine.depths == [3] * 8

    run(scenario())


def test_a_cold_draft_is_switched_off_on_the_engine_and_the_admin_port_says_why(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, depth=AUTO) as rig:
            await ColdTraffic(rig.engine).until(rig, 0)
            assert rig.engine.depths[0] == 0
            assert (await rig.status())["engines"][0]["depth"] == 0
            engine = await depth_of(rig)
            assert (engine["engine"], engine["draft_version"]) == ("engine-0", 0)
            assert engine["acceptance"][0]["share"] < 0.05
            change = next(change for change in engine["changes"] if change["bucket"] == 1)
            assert change["before"] == 3
            assert "faster" in change["reason"]
            options = engine["buckets"][0]["options"]
            assert [option["depth"] for option in options] == [0, 1, 2, 3]
            assert [option["source"] for option in options[::3]] == ["now", "compared"]
            assert options[0]["tokens_per_s"] > options[3]["tokens_per_s"]
            assert await rig.metric('paceline_depth{bucket="1",engine="engine-0"}') == 0.0
            assert await rig.metric('paceline_depth_changes_total{engine="engine-0"}') == engine["num_changes"]
            steps = await rig.metric('paceline_decode_steps_total{bucket="1",depth="3",engine="engine-0"}')
            assert steps == options[3]["num_steps"]

    run(scenario())


def test_an_engine_that_restarts_gets_its_depths_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, depth=AUTO) as rig:
            await ColdTraffic(rig.engine).until(rig, 0)
            await rig.engine.restart(draft_version=0)
            assert rig.engine.depths[0] == 3

            async def told_again() -> bool:
                await rig.engine.publish_stats()
                return rig.engine.depths[0] == 0

            await eventually(told_again)

    run(scenario())


def test_an_engine_that_refuses_its_depths_is_asked_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, depth=AUTO) as rig:
            rig.engine.refuses_depth = True
            traffic = ColdTraffic(rig.engine)

            async def refused() -> bool:
                await traffic.second()
                return "depth" in rig.engine.calls

            await eventually(refused)
            assert not (await depth_of(rig))["is_applied"]
            assert rig.engine.depths == [3] * 8
            rig.engine.refuses_depth = False
            await traffic.until(rig, 0)

    run(scenario())
