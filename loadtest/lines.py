"""Lines of a file of any kind, one at a time and none of them too long to hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO

MAX_LINE_BYTES = 16 << 20
"""A longer line is no record of anybody's; it is passed over and never held as a whole."""


def bounded_lines(file: IO[bytes]) -> Iterator[bytes | None]:
    """None for a line that is too long."""
    while line := file.readline(MAX_LINE_BYTES):
        if len(line) < MAX_LINE_BYTES or line.endswith(b"\n"):
            yield line
            continue
        while (rest := file.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
            pass
        yield None
