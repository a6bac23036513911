"""What a run left in its directory, read line by line so that a run of any length fits in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from loadtest.lines import bounded_lines
from loadtest.records import REQUESTS_FILE, RUN_FILE, SCENARIO_FILE, TIMELINE_FILE, RequestRecord, RunRecord, SystemSample
from loadtest.scenario import Scenario
from wire.errors import PacelineError

_Line = TypeVar("_Line")


class RunDirectoryError(PacelineError):
    """The directory does not hold a run."""

    code = "not_a_run"


class RunDirectory:
    """One run on disk. Lines that cannot be read are left out and counted: a run that was killed ends in half a line."""

    def __init__(self, path: Path) -> None:
        """Raises RunDirectoryError where there is no run, ConfigError where its scenario is not one."""
        self.path = path
        for name in (SCENARIO_FILE, REQUESTS_FILE):
            if not (path / name).is_file():
                raise RunDirectoryError(f"{path} holds no run: {name} is missing; `paceline bench run SCENARIO` makes one")
        self.scenario = Scenario.read(path / SCENARIO_FILE, [])
        self.record = _record(path / RUN_FILE)
        """None where the run was killed before it wrote any."""
        self.num_unreadable: Counter[str] = Counter()
        """Lines left out, by file, of the readings so far."""

    def requests(self) -> Iterator[RequestRecord]:
        """Every request, in the order in which they ended."""
        return self._lines(REQUESTS_FILE, RequestRecord)

    def samples(self) -> Iterator[SystemSample]:
        """Every sample of the system, in time; none where the system could not be watched."""
        if not (self.path / TIMELINE_FILE).is_file():
            return iter(())
        return self._lines(TIMELINE_FILE, SystemSample)

    def _lines(self, name: str, kind: type[_Line]) -> Iterator[_Line]:
        decoder = msgspec.json.Decoder(kind)
        self.num_unreadable[name] = 0
        try:
            with (self.path / name).open("rb") as file:
                for line in bounded_lines(file):
                    found = None if line is None else _decoded(decoder, line)
                    if found is not None:
                        yield found
                    else:
                        self.num_unreadable[name] += line is None or bool(line.strip())
        except OSError as error:
            raise RunDirectoryError(f"cannot read {self.path / name}: {error}") from error


def _decoded(decoder: msgspec.json.Decoder[_Line], line: bytes) -> _Line | None:
    """None of what is no line of a run."""
    try:
        return decoder.decode(line)
    except (msgspec.DecodeError, RecursionError):
        return None


def _record(path: Path) -> RunRecord | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunRecord)
    except (OSError, msgspec.DecodeError, RecursionError):
        return None
