"""What became of each group, in the order it happened: a line for each station, so that `paceline rl why` can tell.

What a killed run told after its last record is cut off when it goes on.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Station = Literal["submitted", "finished", "taken", "trained", "evicted"]
"""`taken`: into a batch; `trained`: the version that learned from it serves."""


class GroupEvent(Struct, frozen=True, kw_only=True, omit_defaults=True):
    at_s: float
    """Unix time."""
    group_id: int
    station: Station
    version: int
    """Of the newest target then; of one that was trained on, the version its batch led to."""
    environment: str
    environment_seed: int
    attempt: int = 0
    """How many groups before it were evicted and led to this one."""
    oldest_version: int | None = None
    """Of its oldest token, once it has finished."""
    reason: str = ""
    """Why it was evicted."""
    refill_of: int | None = None
    """The evicted group whose place it takes."""
