"""GPU seconds: added up from what NVML tells, and where it is missing from the clock."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from loadtest.run.gpu_time import GpuTime, busy_shares

NVML = """
#include <stdint.h>
typedef struct { unsigned int gpu, memory; } utilization;
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) {
  *device = (void *)((uintptr_t)0x7f0000000000 + index);
  return 0;
}
int nvmlDeviceGetUtilizationRates(void *device, utilization *found) {
  uintptr_t index = (uintptr_t)device - 0x7f0000000000;
  found->gpu = index ? 100 : 25;
  found->memory = 7;
  return index == 2 ? 3 : 0; /* not supported, as of a GPU that is split */
}
"""


def test_gpu_seconds_are_the_busy_shares_of_the_time_between_readings() -> None:
    readings = iter([{"gpu-0": 1.0, "gpu-1": 0.5}, {"gpu-0": 0.25, "gpu-1": 0.0}, {"gpu-0": 0.5, "gpu-1": 1.0}])
    time = GpuTime(lambda: next(readings))
    assert time.until(10.0) == {"gpu-0": 0.0, "gpu-1": 0.0}, "nothing is known of what was before"
    assert time.until(12.0) == {"gpu-0": 0.5, "gpu-1": 0.0}
    assert time.until(13.0) == {"gpu-0": 1.0, "gpu-1": 1.0}


def test_a_gpu_that_does_not_tell_how_busy_it_is_counts_all_the_time() -> None:
    time = GpuTime(lambda: {"gpu-0": None})
    time.until(1.0)
    assert time.until(4.0) == {"gpu-0, busy or not": 3.0}


def test_nvml_is_asked_of_every_gpu(tmp_path: Path) -> None:
    """By the interface that NVIDIA documents for its version 2, which never changes: a library of our own stands in."""
    library = tmp_path / "libstand-in.so"
    try:
        subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", library], input=NVML, text=True, check=True)
    except FileNotFoundError:
        pytest.skip("no C compiler on this machine")
    assert busy_shares(str(library)) == {"gpu-0": 0.25, "gpu-1": 1.0, "gpu-2": None}


def test_without_nvml_gpus_are_those_that_have_a_device(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert busy_shares("libabsent.so", tmp_path) == {"gpu-0": None, "gpu-1": None}
    assert busy_shares("libabsent.so", tmp_path / "null") == {}
