"""Processor seconds of processes of this machine, their children counted."""

from __future__ import annotations

from collections.abc import Mapping

import psutil


def processor_time_s(pids: Mapping[str, int]) -> dict[str, float]:
    """By name, cumulative since each process started; those that are gone are left out."""
    found: dict[str, float] = {}
    for name, pid in pids.items():
        try:
            process = psutil.Process(pid)
            family = [process, *process.children(recursive=True)]
        except psutil.Error:
            continue
        found[name] = sum(_own_time_s(member) for member in family)
    return found


def _own_time_s(process: psutil.Process) -> float:
    """Its own, and that of children it has outlived."""
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system + times.children_user + times.children_system)
