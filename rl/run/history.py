"""What became of each group, in the order it happened: one JSON line for each station, so that `paceline rl why` can tell."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
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


class History:
    """A file that only grows, but for what a killed run did after its last record, which is cut off when it goes on."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def num_bytes(self) -> int:
        return self._path.stat().st_size if self._path.is_file() else 0

    def append(self, event: GroupEvent) -> None:
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(event) + b"\n")

    def cut(self, num_bytes: int) -> None:
        """Keep the beginning; nothing happens where there is less."""
        if self.num_bytes > num_bytes:
            os.truncate(self._path, num_bytes)

    def events(self) -> Iterator[GroupEvent]:
        """Whole lines; one that a kill cut off is no event."""
        try:
            lines = self._path.read_bytes().splitlines()
        except OSError:
            return
        for line in lines:
            try:
                yield msgspec.json.decode(line, type=GroupEvent)
            except msgspec.DecodeError:
                continue
