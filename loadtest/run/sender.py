"""One request: sent, read to its end, and entered into a record."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import aiohttp

from loadtest.client import StreamResult, stream_chat
from loadtest.records import Outcome, RequestRecord
from loadtest.run.clock import Clock
from loadtest.run.tally import Tally
from loadtest.run.target import Target
from loadtest.scenario import Lane
from loadtest.schedule import Planned, domain_of, label
from loadtest.traffic import Prompt

INTERRUPTED = "the run was interrupted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request as it has to be sent."""

    lane: Lane
    planned: Planned
    number: int
    """Of its conversation, from 0."""
    prompt: Prompt
    max_tokens: int
    intended_at_s: float | None
    """None in a closed loop: now."""
    leaves_after_s: float | None


class Sender:
    """Sends turns, and tells those that run when the run is interrupted."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        target: Target,
        clock: Clock,
        tally: Tally,
        keep: Callable[[RequestRecord], None],
    ) -> None:
        self._session = session
        self._target = target
        self._clock = clock
        self._tally = tally
        self._keep = keep
        self._running: set[asyncio.Timeout] = set()
        self._is_interrupted = False

    async def send(self, turn: Turn) -> tuple[RequestRecord, StreamResult]:
        """Returns when the answer has ended, one way or another."""
        patience = asyncio.timeout(turn.leaves_after_s)
        self._tally.begin()
        self._running.add(patience)
        try:
            result = await stream_chat(
                self._session,
                self._target.url,
                self._target.model,
                turn.prompt,
                options={turn.lane.length_key: turn.max_tokens, "temperature": turn.lane.temperature, **turn.lane.options},
                headers=_headers(turn, self._target.headers),
                patience=patience,
                answer_timeout_s=turn.lane.answer_timeout_s,
            )
        finally:
            self._running.discard(patience)
        record = self._record(turn, result)
        self._tally.end(record)
        self._keep(record)
        return record, result

    def leave_all(self) -> None:
        """Every client leaves now."""
        self._is_interrupted = True
        now_s = asyncio.get_running_loop().time()
        for patience in self._running:
            if not patience.expired():
                patience.reschedule(now_s)

    def _record(self, turn: Turn, result: StreamResult) -> RequestRecord:
        at_s = self._clock.of_monotonic
        sent_at_s = at_s(result.sent_at_s)
        return RequestRecord(
            index=turn.planned.index,
            lane=turn.lane.name,
            phase=turn.planned.phase.name,
            domain=domain_of(turn.planned.source),
            prompt_id=turn.prompt.id,
            turn=turn.number,
            intended_at_s=sent_at_s if turn.intended_at_s is None else turn.intended_at_s,
            is_open_loop=turn.intended_at_s is not None,
            sent_at_s=sent_at_s,
            ended_at_s=at_s(result.ended_at_s),
            chunk_times_s=[at_s(time_s) for time_s in result.chunk_times_s],
            chunk_token_counts=result.chunk_token_counts,
            outcome=outcome_of(result),
            error=INTERRUPTED if result.has_left and self._is_interrupted else result.error,
            status=result.status,
            finish_reason=result.finish_reason,
            num_prompt_tokens=result.num_prompt_tokens,
            num_completion_tokens=result.num_completion_tokens,
            num_cached_tokens=result.num_cached_tokens,
            draft_version=result.draft_version,
            target_version=result.target_version,
            kv_path=result.kv_path,
            request_id=result.request_id,
            accepted_per_step=result.accepted_per_step,
            drafted_per_step=result.drafted_per_step,
            num_spec_tokens=result.num_spec_tokens,
            text=result.text,
        )


def outcome_of(result: StreamResult) -> Outcome:
    """An error chunk is a failure whatever follows it; an answer without its end is truncated, whoever ended it."""
    if result.is_ok:
        return "ok"
    if result.has_left:
        return "cancelled" if result.error is None else "failed"
    return "truncated" if result.is_truncated else "failed"


def _headers(turn: Turn, given: Mapping[str, str]) -> dict[str, str]:
    headers = {**given, "X-Paceline-Domain": domain_of(turn.planned.source)}
    if turn.planned.phase.split == "heldout":
        headers["X-Paceline-Capture"] = "off"
    if turn.lane.turns is not None:
        headers["X-Session-Id"] = label(f"{turn.planned.index}-{turn.lane.name}")
    return headers | turn.lane.headers
