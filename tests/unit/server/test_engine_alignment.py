"""An engine that waits for a swap to end before it is brought to the active draft."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

from gateway_rig import eventually, publish, run, running


def test_an_engine_that_restarts_while_it_waits_for_a_swap_is_checked_anew(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, num_engines=2) as rig:
            other, late = rig.engines
            known = rig.gateway.fleet.engines[1]
            await late.stop()
            await eventually(lambda: not known.ready)
            other.stage_gate = asyncio.Event()
            version = publish(tmp_path, parent=0)
            swap = asyncio.create_task(rig.activate(version, 0))
            await eventually(lambda: f"stage {version}" in other.calls)
            await late.restart(draft_version=0)
            await eventually(lambda: known.epoch == late.epoch)
            late.epoch, late.parts = uuid.uuid4().hex, ["weights"]
            other.stage_gate.set()
            assert (await swap).status == 200
            await eventually(lambda: "capture" in known.reason)
            assert not known.ready
            late.parts = ["capture", "weights"]
            await eventually(lambda: known.ready and known.epoch == late.epoch and late.draft_version == version)

    run(scenario())
