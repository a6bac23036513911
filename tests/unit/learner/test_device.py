"""Where the learner computes, as far as it can be told without a GPU; tests/gpu/test_learner_on_gpu.py has the rest."""

from __future__ import annotations

import pytest
import torch

from learner.config import DeviceChoice
from learner.device import choose_device
from wire.errors import ConfigError


@pytest.mark.parametrize(
    ("wanted", "num_gpus", "rank", "device"),
    [
        ("auto", 0, 0, "cpu"),
        ("auto", 0, 1, "cpu"),
        ("auto", 1, 0, "cuda:0"),
        ("auto", 2, 1, "cuda:1"),
        ("cuda", 1, 0, "cuda:0"),
        ("cpu", 4, 3, "cpu"),
    ],
)
def test_a_process_computes_on_a_gpu_of_its_own_where_there_are_some(
    wanted: DeviceChoice, num_gpus: int, rank: int, device: str
) -> None:
    assert choose_device(wanted, num_gpus=num_gpus, rank=rank) == torch.device(device)


@pytest.mark.parametrize(("wanted", "num_gpus", "rank"), [("cuda", 0, 0), ("auto", 1, 1), ("cuda", 2, 2)])
def test_too_few_gpus_are_an_error_that_says_what_to_do(wanted: DeviceChoice, num_gpus: int, rank: int) -> None:
    with pytest.raises(ConfigError, match=rf"process {rank} needs a GPU of its own and torch has {num_gpus}.*'cpu'"):
        choose_device(wanted, num_gpus=num_gpus, rank=rank)
