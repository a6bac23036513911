from __future__ import annotations

import asyncio
import json

from loadtest.bars import matching
from loadtest.bars.registry import Bench, load


def test_throughput_matching_meets_its_bars() -> None:
    values = asyncio.run(matching.simulated(Bench(())))
    bars = [bar for bar in load() if bar.function == "matching:simulated"]
    assert {bar.name for bar in bars} == {f"P5.{name}" for name in values}
    for bar in bars:
        measured = values[bar.name.removeprefix("P5.")]
        assert bar.is_met(measured.value), (bar.name, measured)
        json.dumps(measured.detail)
