"""Ports for processes that bind them some time after they were chosen."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""From which the kernel takes ports for outgoing connections, ip(7)."""
_FIRST = 10_000
_LEAST_ROOM = 1_000


def free_ports(number: int) -> list[int]:
    """Loopback ports that are free now, all different; all are held until the last is found.

    They lie below what the kernel gives outgoing connections, where that leaves room: nobody's connection takes one in between.
    """
    found: list[int] = []
    with ExitStack() as held:
        for port in _candidates():
            if len(found) == number:
                break
            sock = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
            found.append(int(sock.getsockname()[1]))
    return found


def _candidates() -> Iterator[int]:
    room = range(_FIRST, _first_of_connections())
    if len(room) >= _LEAST_ROOM:
        yield from random.SystemRandom().sample(room, len(room))
    while True:
        yield 0  # any the kernel has


def _first_of_connections() -> int:
    try:
        return int(_RANGE_FILE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0
