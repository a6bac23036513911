"""The directory a run leaves: `scenario.toml` as resolved, `run.json`, `requests.jsonl` and `timeline.jsonl`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from loadtest.records import REQUESTS_FILE, RUN_FILE, SCENARIO_FILE, TIMELINE_FILE, RequestRecord, RunRecord, SystemSample
from loadtest.scenario import Scenario
from wire.errors import PacelineError

_BUFFER_BYTES = 1 << 20
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


class OutputError(PacelineError):
    """The directory cannot take a run."""

    code = "bad_output_directory"


class Output:
    """Written while the run goes on; nothing is kept in memory."""

    def __init__(self, directory: Path, scenario: Scenario) -> None:
        """Makes the directory; raises OutputError where it holds something or cannot be made."""
        self.directory = directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if any(directory.iterdir()):
                raise OutputError(f"{directory} is not empty; give another directory with --out")
            self.write_scenario(scenario)
            self._requests = (directory / REQUESTS_FILE).open("wb", buffering=_BUFFER_BYTES)
            self._timeline = (directory / TIMELINE_FILE).open("wb", buffering=_BUFFER_BYTES)
        except OSError as error:
            raise OutputError(f"cannot write to {directory}: {error}; give another directory with --out") from error
        self._encoder = msgspec.json.Encoder()
        self.problem: str | None = None
        """Why nothing is kept any more, from then on."""

    def write_scenario(self, scenario: Scenario) -> None:
        """Anew where the run itself decides how long its phases are."""
        (self.directory / SCENARIO_FILE).write_text(as_toml(scenario))

    def add_request(self, record: RequestRecord) -> None:
        self._keep(self._requests, record)

    def add_sample(self, sample: SystemSample) -> None:
        self._keep(self._timeline, sample)

    def _keep(self, file: BinaryIO, record: RequestRecord | SystemSample) -> None:
        if self.problem is None:
            try:
                file.write(self._encoder.encode(record) + b"\n")
            except OSError as error:
                self._give_up(error)

    def flush(self) -> None:
        """To be called once a second: what a killed run has measured until then is kept."""
        if self.problem is None:
            try:
                self._requests.flush()
                self._timeline.flush()
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self.problem = f"cannot write to {self.directory} any more: {error}; what came since is lost"

    def write_run(self, record: RunRecord) -> None:
        """Raises OutputError; what was there stays."""
        temporary = self.directory / f".{RUN_FILE}.tmp"
        try:
            temporary.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
            temporary.rename(self.directory / RUN_FILE)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise OutputError(f"cannot write {self.directory / RUN_FILE}: {error}") from error

    def close(self) -> None:
        for file in (self._requests, self._timeline):
            with suppress(OSError):  # what `flush` could not write
                file.close()


def as_toml(scenario: Scenario) -> str:
    """The whole scenario, defaults included, so that it can be run again."""
    return "\n".join(_lines(scenario.model_dump(mode="json", exclude_none=True), "")).strip() + "\n"


def _lines(table: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """Plain values first, because TOML gives what follows a header to that header."""
    for key, value in table.items():
        if not _is_nested(value):
            yield f"{_key(key)} = {_value(value)}"
    for key, value in table.items():
        if not _is_nested(value):
            continue
        name = prefix + _key(key)
        header = f"[{name}]" if isinstance(value, dict) else f"[[{name}]]"
        for part in [value] if isinstance(value, dict) else value:
            yield from ("", header)
            yield from _lines(part, name + ".")


def _is_nested(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(isinstance(one, dict) for one in value)
    return isinstance(value, dict)


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _text(key)


def _value(value: Any) -> str:
    """A scalar, or a list of them; a table within a list of something else is written inline."""
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {_value(one)}" for key, one in value.items()) + "}"
    return _text(value)


def _text(value: Any) -> str:
    """JSON is TOML, but for the one control character that JSON leaves as it is."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
