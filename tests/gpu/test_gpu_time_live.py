"""NVML as the load tester reads it, on a real GPU. Skipped without one."""

from __future__ import annotations

import time

import pytest
import torch

from loadtest.run.gpu_time import busy_shares

pytestmark = [pytest.mark.gpu]
COMPUTES_S = 3.0
"""Three times the longest time that NVML averages over."""


def test_a_gpu_that_computes_is_busy() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA device on this machine")
    matrix = torch.rand(4096, 4096, device="cuda")
    until_s = time.monotonic() + COMPUTES_S
    while time.monotonic() < until_s:
        (matrix @ matrix).sum().item()
    shares = busy_shares()
    assert len(shares) >= torch.cuda.device_count()
    assert all(share is None or 0.0 <= share <= 1.0 for share in shares.values())
    known = [share for share in shares.values() if share is not None]
    assert not known or max(known) > 0.5
