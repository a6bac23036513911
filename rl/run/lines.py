"""A file of JSON lines, one message each, which a kill may cut off anywhere."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
from msgspec import Struct

Line = TypeVar("Line", bound=Struct)


class Lines(Generic[Line]):
    """One process appends, others may read meanwhile."""

    def __init__(self, path: Path, kind: type[Line]) -> None:
        self._path = path
        self._decoder = msgspec.json.Decoder(kind)

    @property
    def num_bytes(self) -> int:
        return self._path.stat().st_size if self._path.is_file() else 0

    def append(self, *lines: Line) -> None:
        with self._path.open("ab") as file:
            file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))

    def read(self) -> list[Line]:
        """Oldest first; what is no such message, as a line that was cut off, is left out."""
        try:
            raw = self._path.read_bytes().splitlines()
        except OSError:
            return []
        found = []
        for line in raw:
            try:
                found.append(self._decoder.decode(line))
            except msgspec.DecodeError:
                continue
        return found

    def cut(self, num_bytes: int) -> None:
        """Keep the beginning; nothing happens where there is less."""
        if self.num_bytes > num_bytes:
            os.truncate(self._path, num_bytes)

    def keep(self, is_kept: Callable[[Line], bool]) -> None:
        """Without the others, and without what is no message."""
        if not self._path.is_file():
            return
        kept = [line for line in self.read() if is_kept(line)]
        temporary = self._path.with_name(f".{self._path.name}.tmp")
        temporary.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in kept))
        temporary.rename(self._path)
