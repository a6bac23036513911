"""Windowed FIFO: finished groups are taken in the order they finished, but only from among the oldest submitted ones.

Strict FIFO waits for the slowest group; taking whatever is finished prefers short answers and lets long ones go stale. A group may
be overtaken by `size - 1` others at most (TorchTitan's RL trainer, after MiniMax's report), and finished on its last version by none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import floor

WINDOW_FRACTION = 0.3
"""Of the groups that may be outstanding."""


def window_size(max_outstanding: int) -> int:
    """At least 1, which is strict FIFO."""
    return max(1, floor(WINDOW_FRACTION * max_outstanding))


Rank = tuple[bool, int]
"""(False where it is the group's last chance before it is too old, when it finished among the others)."""


def choose(outstanding: Sequence[int], finished: Mapping[int, Rank], count: int, size: int) -> list[int]:
    """`count` finished groups in the order to take them, or as many as there are now.

    outstanding: ids of groups neither taken nor evicted; ids count up as groups are submitted. finished: ranks by id, lowest first.
    The window is over ids, [oldest, oldest + size), so it moves on when its oldest group is taken.
    """
    remaining = sorted(outstanding)
    chosen: list[int] = []
    while remaining and len(chosen) < count:
        ready = [group_id for group_id in remaining if group_id < remaining[0] + size and group_id in finished]
        if not ready:
            break
        first = min(ready, key=lambda group_id: finished[group_id])
        chosen.append(first)
        remaining.remove(first)
    return chosen
