"""All requests of a run as columns of numbers: 200 bytes a request and 4 a chunk, whatever their texts."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from loadtest.measures import definitions
from loadtest.measures.histogram import Floats, Ints
from loadtest.records import COMMITTED, RequestRecord, Swap
from loadtest.scenario import Slo

Mask = NDArray[np.bool_]

GROUPS = ("lane", "phase", "domain", "draft_version", "target_version", "kv_path")
"""What requests are told apart by."""
_NUMBERS = (
    "intended_at_s", "sent_at_s", "ended_at_s", "ttft_s", "tpot_s", "e2e_s", "num_tokens", "num_chunks", "num_prompt_tokens",
    "num_cached_tokens", "num_verify_steps", "num_accepted", "acceptance_length",
)  # fmt: skip


@dataclass
class Categories:
    """A column of words as numbers."""

    codes: array[int] = field(default_factory=lambda: array("q"))
    numbers: dict[str, int] = field(default_factory=dict)

    def append(self, word: str) -> None:
        self.codes.append(self.numbers.setdefault(word, len(self.numbers)))

    def masks(self) -> Iterator[tuple[str, Mask]]:
        """Each word and the requests that have it."""
        codes = np.asarray(self.codes)
        for word, number in self.numbers.items():
            yield word, codes == number


class RequestTable:
    """The columns. NaN where a request has no such number."""

    def __init__(self, records: Iterable[RequestRecord], slo: Slo, swaps: Sequence[Swap] = ()) -> None:
        """`swaps` tell which answers more than one draft had a part in."""
        self._slo = slo
        self._swaps = swaps
        self._numbers = {name: array("d") for name in _NUMBERS}
        self._gaps_s = array("f")
        self.groups = {name: Categories() for name in (*GROUPS, "outcome", "prompt_id", "finish_reason")}
        self._turns = array("q")
        self._is_good = array("b")
        self._is_open_loop = array("b")
        for record in records:
            self._append(record)

    def _append(self, record: RequestRecord) -> None:
        steps = record.accepted_per_step
        row = {
            "intended_at_s": record.intended_at_s,
            "sent_at_s": record.sent_at_s,
            "ended_at_s": record.ended_at_s,
            "ttft_s": definitions.ttft_s(record),
            "tpot_s": definitions.tpot_s(record),
            "e2e_s": definitions.e2e_s(record),
            "num_tokens": definitions.num_tokens(record),
            "num_chunks": len(record.chunk_times_s),
            "num_prompt_tokens": record.num_prompt_tokens,
            "num_cached_tokens": record.num_cached_tokens,
            "num_verify_steps": len(steps) if steps else None,
            "num_accepted": sum(steps) if steps else None,
            "acceptance_length": definitions.acceptance_length(record),
        }
        for name, value in row.items():
            self._numbers[name].append(float("nan") if value is None else value)
        for name, categories in self.groups.items():
            word = self._draft_versions(record) if name == "draft_version" else getattr(record, name)
            categories.append(str(word or "unknown"))
        self._gaps_s.extend(definitions.itls_s(record))
        self._turns.append(record.turn)
        self._is_good.append(definitions.is_good(record, self._slo))
        self._is_open_loop.append(record.is_open_loop)

    def _draft_versions(self, record: RequestRecord) -> str | None:
        """The one of its first byte, as the answer's headers say, and the last one swapped in before its end."""
        if record.draft_version is None or not record.chunk_times_s:
            return record.draft_version
        first_s = record.chunk_times_s[0]
        later = [
            swap.version
            for swap in self._swaps
            if swap.outcome == COMMITTED and first_s < swap.at_s + swap.duration_s < record.ended_at_s
        ]
        changed = bool(later) and str(later[-1]) != record.draft_version
        return f"{record.draft_version} to {later[-1]}" if changed else record.draft_version

    def __len__(self) -> int:
        return len(self._turns)

    def __getitem__(self, name: str) -> Floats:
        """A column of numbers by its name."""
        return np.asarray(self._numbers[name])

    @property
    def turns(self) -> Ints:
        return np.asarray(self._turns)

    @property
    def is_good(self) -> Mask:
        return np.asarray(self._is_good, dtype=bool)

    @property
    def is_open_loop(self) -> Mask:
        return np.asarray(self._is_open_loop, dtype=bool)

    def has_outcome(self, *outcomes: str) -> Mask:
        numbers = [self.groups["outcome"].numbers.get(outcome, -1) for outcome in outcomes]
        return np.isin(np.asarray(self.groups["outcome"].codes), numbers)

    def gaps(self, chosen: Mask) -> tuple[Floats, Ints]:
        """The waits between chunks of the chosen requests, seconds, and the row of the request of each."""
        per_request = np.maximum(self["num_chunks"] - 1, 0).astype(np.int64)
        rows = np.repeat(np.arange(len(self)), per_request)
        kept = chosen[rows]
        return np.asarray(self._gaps_s, dtype=float)[kept], rows[kept]
