"""The speed of KV between engines, as the engines' own metrics tell it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from gateway_rig import eventually, run, running

from server.routing.cost import CostModel
from server.transfers import TransferWatch


def test_bandwidth_is_learned_from_what_engines_pulled(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, kinds=("prefill", "decode", "decode")) as rig:
            costs = CostModel(lambda: 0.0)
            before = costs.bytes_per_second
            await rig.engines[1].stop()
            rig.engines[2].metrics_text = (
                'vllm:nixl_bytes_transferred_sum{engine="0"} 4e7\n'
                'vllm:nixl_bytes_transferred_sum{engine="1"} 4e7\n'
                'vllm:nixl_xfer_time_seconds_sum{engine="0"} 0.8\n'
                "vllm:nixl_xfer_time_seconds_count 3\n"
            )

            async def scraped() -> None:
                """Until what the engine says now was read and taken in."""
                until = rig.engines[2].num_scrapes + 3
                await eventually(lambda: rig.engines[2].num_scrapes >= until)

            watching = asyncio.create_task(TransferWatch(rig.gateway.fleet, costs, period_s=0.01).watch())
            await eventually(lambda: costs.bytes_per_second < before)
            learned = costs.bytes_per_second
            await scraped()
            assert costs.bytes_per_second == pytest.approx(learned), "the same totals tell nothing new"
            rig.engines[2].metrics_text = "vllm:nixl_bytes_transferred_sum much\n"
            await scraped()
            assert not watching.done()
            watching.cancel()

    run(scenario())
