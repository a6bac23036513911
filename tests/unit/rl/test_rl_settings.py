"""Settings of a run: the shipped ones, and what does not go together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launch.config import SystemConfig
from rl.config import RunSettings, read_environments
from wire.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
SHIPPED = ROOT / "configs" / "rl.toml"


def test_the_shipped_run_fits_its_system() -> None:
    config = SystemConfig.load([SHIPPED])
    (environment,) = read_environments(config.environment, source="test")
    assert environment.name == "sums"
    assert config.rollouts.enabled
    assert config.rl.trainer.dtype == config.target.dtype
    assert config.rl.generator.concurrency.least <= config.engine.get("max_num_seqs", 16)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"generator": {"max_output_tokens": 64}}, "generator.max_output_tokens is 64 and trainer.max_output_tokens 1024"),
        ({"checkpoint_every_steps": 40}, "num_dumps is 16, but up to 40 steps are made again"),
        ({"reward_model": {"weight": 1.5}}, "weight"),
        ({"name": "../up"}, "name"),
        ({"num_step": 4}, "did you mean num_steps"),
        ({"eta": -1}, "eta"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunSettings.build(table, source="test")


def test_an_unknown_environment_is_found_when_the_configuration_is_read() -> None:
    with pytest.raises(ConfigError, match="there are addition, brevity"):
        SystemConfig.load([], ['environment=[{name="a", kind="no_such"}]'])
