from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from loadtest.bars import training
from loadtest.processes import SystemUnderTestError

sys.path.insert(0, str(Path(__file__).parent.parent / "drafter"))

from tiny_target import CONFIG, write_target


def test_the_learner_measures_itself(tmp_path: Path) -> None:
    target_dir = write_target(tmp_path / "tiny")
    (target_dir / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 12}))
    measured = asyncio.run(training.measured(target_dir, 48))
    assert measured.value is not None
    assert measured.value > 100
    assert measured.detail["tokens_per_s"] > 0
    assert measured.detail["unroll"] == 3
    json.dumps(measured.detail)


def test_a_measurement_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(SystemUnderTestError, match="absent"):
        asyncio.run(training.measured(tmp_path / "absent", 48))
