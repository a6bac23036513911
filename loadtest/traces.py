"""Mooncake-style traces: when requests came, how long they were, and which blocks of their prompts were alike.

A trace holds no text. `words_of` writes a prompt of about the length, in which equal block names stand for equal text, so
that requests share prefixes as the recorded ones did.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated

import msgspec

from loadtest.lines import bounded_lines
from loadtest.traffic import TrafficError

BLOCK_TOKENS = 512
"""Of the published traces, per entry of `hash_ids`."""
_WORDS_PER_TOKEN = 0.75
"""Of English prose, about; the server's own count is what is recorded."""

MAX_TOKENS = 1 << 20
"""Of a prompt or an answer; a line that asks for more is taken for broken, or one line would hold up all others."""

_Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]


class TraceRow(msgspec.Struct, frozen=True):
    """One line of a trace."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    """Milliseconds since the trace began."""
    input_length: _Count
    output_length: _Count
    hash_ids: tuple[int, ...] = ()

    def at_s(self, time_scale: float) -> float:
        return self.timestamp / 1000 * time_scale

    def max_tokens(self, length_scale: float) -> int:
        return max(round(self.output_length * length_scale), 1)


@dataclass(frozen=True)
class Recording:
    """What was read of a trace."""

    rows: list[TraceRow]
    """In time order."""
    num_broken: int
    """Lines that are no rows."""


def read_trace(path: Path, *, before_ms: float = math.inf) -> Recording:
    """The rows before that time of the trace. Raises TrafficError where the file cannot be read or holds no row at all."""
    rows: list[TraceRow] = []
    num_broken = num_rows = 0
    try:
        with path.open("rb") as file:
            for row in _rows(file):
                if row is None:
                    num_broken += 1
                    continue
                num_rows += 1
                if row.timestamp < before_ms:
                    rows.append(row)
    except OSError as error:
        raise TrafficError(f"cannot read the trace {path}: {error}") from error
    if not num_rows:
        raise TrafficError(
            f"{path} holds no line with timestamp, input_length and output_length; is it a Mooncake-style trace?"
        )
    return Recording(sorted(rows, key=lambda row: row.timestamp), num_broken)


def _rows(file: IO[bytes]) -> Iterator[TraceRow | None]:
    """None for a line that is no row."""
    decoder = msgspec.json.Decoder(TraceRow)
    for line in bounded_lines(file):
        try:
            yield None if line is None else decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            yield None


def words_of(row: TraceRow, vocabulary: Sequence[str], *, length_scale: float, seed: int) -> str:
    """A text of about the row's prompt length, of words of `vocabulary`."""
    num_tokens = max(round(row.input_length * length_scale), 1)
    block_words = max(round(BLOCK_TOKENS * length_scale * _WORDS_PER_TOKEN), 1)
    num_words = max(round(num_tokens * _WORDS_PER_TOKEN), 1)
    words: list[str] = []
    for name in row.hash_ids[: math.ceil(num_words / block_words)]:
        words += random.Random(f"{seed}/{name}").choices(vocabulary, k=block_words)
    if len(words) < num_words:
        words += random.Random(f"{seed}/{row.timestamp}/{row.input_length}").choices(vocabulary, k=num_words - len(words))
    return " ".join(words[:num_words])
