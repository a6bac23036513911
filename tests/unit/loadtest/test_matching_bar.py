from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from loadtest.bars import matching
from loadtest.bars.registry import Bar, Bench, Measured, load
from loadtest.run.conduct import Provenance
from rl.controllers.measure import START, imbalance
from rl.controllers.split import SplitLimits


def missed(values: dict[str, Measured]) -> set[str]:
    bars: list[Bar] = [bar for bar in load() if bar.function == "matching:simulated"]
    assert {bar.name for bar in bars} == {f"P5.{name}" for name in values}
    return {bar.name for bar in bars if not bar.is_met(values[bar.name.removeprefix("P5.")].value)}


def test_throughput_matching_meets_its_bars() -> None:
    values = asyncio.run(matching.simulated(Bench((), Provenance(None, {}, {}))))
    assert missed(values) == set(), values
    for measured in values.values():
        json.dumps(measured.detail)


@pytest.mark.parametrize("most_moved", [0, 1])
def test_a_split_that_never_moves_or_not_far_enough_misses_a_bar(most_moved: int) -> None:
    least, most = START.rollouts - most_moved, START.rollouts + most_moved
    limits = SplitLimits(least=replace(START, rollouts=least, trainer=least), most=replace(START, rollouts=most, trainer=most))
    values = matching.measured({"100:60": imbalance(100.0, 60.0, limits), "60:100": imbalance(60.0, 100.0, limits)})
    assert missed(values) == {"P5.matching_over_first_split"}
