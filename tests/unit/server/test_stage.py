from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from waiting import wait_until

from server.engine.stage import Stage, read_weights
from wire.artifact import CONFIG_FILE, WEIGHTS_FILE
from wire.errors import ArtifactError


@pytest.mark.parametrize("config", ["[]", "null", "{", "3"])
def test_a_draft_whose_config_is_no_object_is_refused_in_the_background_too(tmp_path: Path, config: str) -> None:
    save_file({"fc.weight": torch.zeros(2, 2)}, tmp_path / WEIGHTS_FILE)
    (tmp_path / CONFIG_FILE).write_text(config)
    stage = Stage(lambda _version: read_weights(tmp_path))
    stage.begin(3)
    with pytest.raises(ArtifactError, match=r"unreadable|no JSON object"):
        wait_until(lambda: stage.outcome(3))
    assert stage.versions() == []


def test_the_newest_few_are_held_and_what_is_protected(tmp_path: Path) -> None:
    save_file({"fc.weight": torch.zeros(2, 2)}, tmp_path / WEIGHTS_FILE)
    (tmp_path / CONFIG_FILE).write_text("{}")
    stage = Stage(lambda _version: read_weights(tmp_path))
    stage.protect = {0}
    for version in range(7):
        stage.load_now(version)
    assert stage.versions() == [0, 4, 5, 6]
