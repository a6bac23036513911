"""The watchdog: a tiny process that ends every process group of a system whose supervisor is gone.

The supervisor holds the write end of the watchdog's stdin and writes `+<pgid>` and `-<pgid>` lines. When the supervisor
dies, however it dies, the pipe closes, and whatever groups are left are terminated and then killed. The watchdog lives in
a session of its own and ignores the signals a terminal sends.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable


def follow(lines: Iterable[str]) -> set[int]:
    """The groups that are left when the lines end."""
    groups: set[int] = set()
    for line in lines:
        text = line.strip()
        if text[:1] == "+":
            groups.add(int(text[1:]))
        elif text[:1] == "-":
            groups.discard(int(text[1:]))
    return groups


def signal_group(group: int, number: int) -> bool:
    """Send a signal (0 only asks) to a process group; False where the group is gone."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def end_groups(groups: set[int], *, grace_s: float) -> None:
    """SIGTERM, wait, SIGKILL."""
    alive = {group for group in groups if signal_group(group, signal.SIGTERM)}
    deadline = time.monotonic() + grace_s
    while alive and time.monotonic() < deadline:
        time.sleep(0.1)
        alive = {group for group in alive if signal_group(group, 0)}
    for group in alive:
        signal_group(group, signal.SIGKILL)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end_groups(follow(sys.stdin), grace_s=float(sys.argv[1]))


if __name__ == "__main__":
    main()
