"""GPU seconds of this machine, from NVIDIA's management library (NVML), which every driver brings along."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

NVML = "libnvidia-ml.so.1"
DEVICES = Path("/dev")
_SUCCESS = 0


class GpuTime:
    """Adds up how long each GPU was busy."""

    def __init__(self, shares: Callable[[], Mapping[str, float | None]]) -> None:
        """`shares` tells of each GPU the share of the last moments in which it was busy, None where it is not known."""
        self._shares = shares
        self._seconds: dict[str, float] = {}
        self._read_at_s: float | None = None

    def until(self, at_s: float) -> dict[str, float]:
        """GPU seconds by GPU since the first call. One that does not tell how busy it is counts all the time, and its name
        says so: who has it pays for it.
        """
        passed_s = 0.0 if self._read_at_s is None else at_s - self._read_at_s
        self._read_at_s = at_s
        for name, share in self._shares().items():
            label = f"{name}, busy or not" if share is None else name
            self._seconds[label] = self._seconds.get(label, 0.0) + (1.0 if share is None else share) * passed_s
        return dict(self._seconds)


class _Utilization(ctypes.Structure):
    """`nvmlUtilization_t`: percent of the last sixth of a second to second, as the GPU's model has it."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


def busy_shares(library: str = NVML, devices: Path = DEVICES) -> dict[str, float | None]:
    """Of every GPU that this machine shows (a container: that it was given); empty without one.

    A GPU that is split (MIG) has no busy share, nor has any where NVML is missing.
    """
    nvml = _load(library)
    count = ctypes.c_uint()
    if nvml is None or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != _SUCCESS:
        return {f"gpu-{device.name.removeprefix('nvidia')}": None for device in sorted(devices.glob("nvidia[0-9]*"))}
    return {f"gpu-{index}": _busy_share(nvml, index) for index in range(count.value)}


def _busy_share(nvml: ctypes.CDLL, index: int) -> float | None:
    device, found = ctypes.c_void_p(), _Utilization()
    if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)) != _SUCCESS:
        return None
    if nvml.nvmlDeviceGetUtilizationRates(device, ctypes.byref(found)) != _SUCCESS:
        return None
    return float(found.gpu) / 100.0


@cache
def _load(library: str) -> ctypes.CDLL | None:
    """The library, initialised once for the life of this process; None where it is missing or finds no driver."""
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return None
    return nvml if nvml.nvmlInit_v2() == _SUCCESS else None
