"""Held-out problems are played side by side, greedily, whatever training begins with."""

from __future__ import annotations

from pathlib import Path

import pytest
from generator_rig import TALK, importable, rig, run

from rl.config import HeldoutSettings, RunSettings
from rl.environments.registry import read_environments
from rl.run.heldout import Heldout


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    importable(monkeypatch)


def test_as_many_problems_run_at_a_time_as_training_ever_may(tmp_path: Path) -> None:
    settings = RunSettings.build({"generator": {"concurrency": {"least": 1, "most": 4}}}, source="test")
    talk = {"broken_from": 1 << 31}  # held-out seeds begin at 1 << 30
    environments = read_environments([TALK | {"parameters": talk}], source="test")

    async def scenario() -> None:
        async with rig(tmp_path, talk=talk, pause_s=0.01) as made:
            heldout = Heldout(
                settings,
                HeldoutSettings(num_problems=8),
                environments=environments,
                pool=made.pool,
                gateway=made.gateway,
                target=made.target,
            )
            (result,) = await heldout.measure(num_steps=3, version=0)
            assert (result.environment, result.num_steps, result.version) == ("talk", 3, 0)
            assert len(result.rewards) == 8
            assert None not in result.rewards
            assert made.stand_in.most_open == 4
            assert {body["sampling_params"]["temperature"] for body in made.stand_in.bodies} == {0.0}

    run(scenario())
