"""History: metrics.jsonl, one line an event, for people and scripts. Losing a line never stops learning."""

from __future__ import annotations

import errno
import logging
import os
import time
from pathlib import Path
from typing import Any

import msgspec

log = logging.getLogger(__name__)

_MAX_BYTES = 32 * 1024 * 1024


class History:
    """Append-only; past 32 MiB the file is moved to `metrics.1.jsonl`, replacing the one before."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "metrics.jsonl"
        self._is_failing = False

    def write(self, event: str, **values: Any) -> None:
        """One line: time, event, values. An OSError is logged when it begins, not for every line."""
        line = msgspec.json.encode({"at_s": round(time.time(), 3), "event": event, **values}) + b"\n"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.exists() and self._path.stat().st_size > _MAX_BYTES:
                self._path.rename(self._path.with_name("metrics.1.jsonl"))
            self._append(line)
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                log.warning("cannot write %s: %s", self._path.name, error)
            self._is_failing = True

    def _append(self, line: bytes) -> None:
        """The whole line or nothing of it: a disk that fills up takes the first part, and the next line would follow on that."""
        with self._path.open("ab", buffering=0) as file:
            start = file.seek(0, os.SEEK_END)
            if file.write(line) < len(line):
                file.truncate(start)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
