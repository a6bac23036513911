"""Problems from a file of JSON lines."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import TypeVar

import msgspec

from wire.errors import ConfigError

T = TypeVar("T")


def read_lines(path: Path, kind: type[T]) -> list[T]:
    """Every line as a `kind`; `.gz` is read as such. Raises ConfigError that names the file and the line."""
    decoder = msgspec.json.Decoder(kind)
    problems: list[T] = []
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    try:
                        problems.append(decoder.decode(line))
                    except msgspec.DecodeError as error:
                        raise ConfigError(f"{path}, line {number}: {error}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not problems:
        raise ConfigError(f"{path} holds no problem; one JSON object a line is wanted")
    return problems
