"""DfkvStore: blocks in DFKV. Its servers bound what they hold, so nothing is evicted from here.

The scheduler asks between two steps, when every request of the engine waits for the answer, and a call into DFKV can hang
for 20 s. So a thread asks, and what it has not answered in time is taken for absent.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from server.engine.job_thread import JobThread
from server.engine.kv_store_counts import UNANSWERED, StoreCounts
from wire.kv_block_format import KvBlockHeader, KvRealm
from wire.kv_dfkv import DfkvBlocks
from wire.kv_prefix import KvPrefix

logger = logging.getLogger(__name__)

ANSWER_S = 0.2
"""For all that the scheduler asks at once; DFKV answers a key within a millisecond on a network of its own."""
REST_S = 10.0
"""How long the scheduler asks nothing after an answer that did not come."""
_NAMES_AT_ONCE = 64


class _Question(NamedTuple):
    """What the scheduler asks, where it waits for the answer, and until when."""

    realm: KvRealm
    names: Sequence[str]
    num_ranks: int
    answer: queue.SimpleQueue[list[bool]]
    until_s: float


class DfkvStore:
    """A BlockStore over DFKV."""

    def __init__(self, blocks: DfkvBlocks, counts: StoreCounts) -> None:
        self._blocks = blocks
        self._counts = counts
        self._rests_until_s = 0.0
        self._thread: JobThread[_Question] = JobThread("paceline-kv-ask", self._answer, self._answer_nothing)

    def has(self, realm: KvRealm, names: Sequence[str], num_ranks: int) -> Iterator[bool]:
        until_s = time.monotonic() + ANSWER_S
        for start in range(0, len(names), _NAMES_AT_ONCE):
            some = names[start : start + _NAMES_AT_ONCE]
            yield from self._ask(_Question(realm, some, num_ranks, queue.SimpleQueue(), until_s))

    def has_part(self, header: KvBlockHeader) -> bool:
        return self._blocks.has_part(header)

    def read(self, header: KvBlockHeader, *, tensor_bytes: int) -> bytes:
        return self._blocks.read(header, tensor_bytes=tensor_bytes)

    def discard(self, header: KvBlockHeader) -> None:
        try:
            self._blocks.remove_part(header)
        except OSError:
            return

    def make_room(self, num_bytes: int) -> bool:
        return True

    def write(self, header: KvBlockHeader, data: bytes) -> None:
        self._blocks.write(header, data)

    def note_use(self, prefix: KvPrefix, num_prompt_blocks: int, rank: int) -> None:
        """Once for all ranks: the prompt, whose name the router tells, and the whole, from which a next turn goes on."""
        if rank == 0:
            for num_blocks in {num_prompt_blocks, len(prefix.names)} - {0}:
                self._blocks.note(msgspec.structs.replace(prefix, names=prefix.names[:num_blocks]))

    def _ask(self, question: _Question) -> list[bool]:
        now_s = time.monotonic()
        if now_s >= self._rests_until_s:
            self._thread.put(question)
            try:
                return question.answer.get(timeout=max(question.until_s - now_s, 0.0))
            except queue.Empty:
                logger.warning("DFKV has not answered within %g s: nothing is loaded from it for %g s", ANSWER_S, REST_S)
                self._rests_until_s = time.monotonic() + REST_S
        self._counts.add(UNANSWERED, len(question.names))
        return [False] * len(question.names)

    def _answer(self, question: _Question) -> None:
        if time.monotonic() < question.until_s:  # else nobody waits any more
            question.answer.put(self._blocks.has(question.realm, question.names, question.num_ranks))

    def _answer_nothing(self, question: _Question) -> None:
        question.answer.put([False] * len(question.names))
