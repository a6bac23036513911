"""Assembler: spans of many engine steps become whole requests.

Keyed by engine epoch and request id. Preemption computes rows again: the first copy counts. Rows a prefix cache or a
dropped message left out stay gaps. Everything open is bounded, in rows and in time.

Shape letters: T rows, D hidden, X aux layers times D.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from drafter.batch import UNKNOWN_TOKEN, RequestRows
from drafter.credit import Outcome
from learner.receiver import Received
from learner.request import CapturedRequest
from wire.messages import CaptureSpan

_NUM_REMEMBERED_CLOSED = 4096

RequestKey = tuple[str, str, str]
"""Engine id, engine epoch, request id."""


@dataclass
class _Open:
    """A request whose rows still arrive."""

    first: CaptureSpan
    captured_at_s: float
    touched_at_s: float
    num_prompt_tokens: int | None = None
    positions: list[int] = field(default_factory=list)
    known: set[int] = field(default_factory=set)
    tokens: dict[int, int] = field(default_factory=dict)
    aux: list[Tensor] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    outcomes: dict[int, Outcome] = field(default_factory=dict)


class Assembler:
    """`add` takes received messages and returns the requests they completed."""

    def __init__(
        self,
        *,
        max_open_rows: int,
        max_completion_rows: int,
        max_context_rows: int,
        idle_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_open_rows = max_open_rows
        self._max_completion_rows, self._max_context_rows = max_completion_rows, max_context_rows
        self._idle_timeout_s = idle_timeout_s
        self._clock = clock
        self._open: OrderedDict[RequestKey, _Open] = OrderedDict()
        self._closed: OrderedDict[RequestKey, None] = OrderedDict()
        self._epochs: dict[str, str] = {}
        self.num_open_rows = 0
        self.num_timed_out = 0
        self.num_evicted = 0
        """Requests closed early because too many rows were open."""
        self.num_late_spans = 0
        """Spans of requests that were closed before."""
        self.num_cut_rows = 0
        """Rows beyond what is kept of one request: prompt rows far before its completion, or the end of a long completion."""

    def add(self, received: Received) -> list[CapturedRequest]:
        """Requests that this message closed: finished, of a restarted engine, or pushed out by the bound."""
        step, done = received.step, []
        if self._epochs.setdefault(step.engine_id, step.engine_epoch) != step.engine_epoch:
            stale = [key for key in self._open if key[0] == step.engine_id and key[1] != step.engine_epoch]
            done += [self._close(key) for key in stale]
            self._epochs[step.engine_id] = step.engine_epoch
        start = 0
        for span in step.spans:
            rows = slice(start, start + span.num_valid_rows)
            start += span.num_rows
            key = (step.engine_id, step.engine_epoch, span.request_id)
            if key in self._closed:
                self.num_late_spans += 1
            else:
                self._add_span(key, span, received.aux_TX[rows], received.hidden_TD[rows], step.captured_at_s)
        done += [self._close((step.engine_id, step.engine_epoch, request_id)) for request_id in step.finished_ids]
        while self.num_open_rows > self._max_open_rows and self._open:
            self.num_evicted += 1
            done.append(self._close(next(iter(self._open))))
        return [request for request in done if request is not None]

    def expire(self) -> list[CapturedRequest]:
        """Requests that got no row for `idle_timeout_s`, closed as they are."""
        deadline = self._clock() - self._idle_timeout_s
        stale = [key for key, request in self._open.items() if request.touched_at_s < deadline]
        self.num_timed_out += len(stale)
        return [request for request in map(self._close, stale) if request is not None]

    def _add_span(self, key: RequestKey, span: CaptureSpan, aux_TX: Tensor, hidden_TD: Tensor, captured_at_s: float) -> None:
        request = self._open.get(key)
        if request is None:
            request = self._open[key] = _Open(first=span, captured_at_s=captured_at_s, touched_at_s=0.0)
        request.touched_at_s = self._clock()
        num_committed = span.num_rows - span.num_proposed
        if span.emitted_ids and request.num_prompt_tokens is None:
            request.num_prompt_tokens = span.first_position + num_committed
        for offset, token in enumerate((*span.token_ids[:num_committed], *span.emitted_ids)):
            request.tokens.setdefault(span.first_position + offset, token)
        if span.num_proposed:
            anchor = span.first_position + num_committed - 2
            proposed = tuple(span.token_ids[num_committed:])
            request.outcomes.setdefault(anchor, Outcome(proposed, span.num_accepted, span.draft_version))
        fresh = [row for row in range(span.num_valid_rows) if span.first_position + row not in request.known]
        if fresh:
            positions = [span.first_position + row for row in fresh]
            request.positions += positions
            request.known.update(positions)
            request.aux.append(aux_TX[fresh])
            request.hidden.append(hidden_TD[fresh])
            self.num_open_rows += len(fresh)

    def _close(self, key: RequestKey) -> CapturedRequest | None:
        request = self._open.pop(key, None)
        self._remember_closed(key)
        if request is None:
            return None
        self.num_open_rows -= len(request.positions)
        if request.num_prompt_tokens is None or not request.positions:
            return None
        kept_T = self._kept_rows(request.positions, request.num_prompt_tokens)
        rows = _rows(request, request.num_prompt_tokens, kept_T)
        if rows.num_completion_rows < 2:
            return None
        return CapturedRequest(
            key=f"{key[1]}.{key[2]}",
            prompt_key=request.first.prompt_key or _prompt_key(request, request.num_prompt_tokens),
            tenant=request.first.tenant,
            domain=request.first.domain,
            rows=rows,
            outcomes=request.outcomes,
            captured_at_s=request.captured_at_s,
        )

    def _kept_rows(self, positions: list[int], num_prompt_tokens: int) -> Tensor:
        """Which rows are kept [T], by ascending position: the last of the prompt and the first of the completion.

        The cost of a step grows with both, and with their product.
        """
        positions_T = torch.tensor(positions, dtype=torch.int64)
        first = int((positions_T < num_prompt_tokens - 1).sum())
        kept_T = positions_T.argsort()[max(first - self._max_context_rows, 0) : first + self._max_completion_rows]
        self.num_cut_rows += len(positions) - kept_T.numel()
        return kept_T

    def _remember_closed(self, key: RequestKey) -> None:
        self._closed[key] = None
        while len(self._closed) > _NUM_REMEMBERED_CLOSED:
            self._closed.popitem(last=False)


def _rows(request: _Open, num_prompt_tokens: int, kept_T: Tensor) -> RequestRows:
    positions_T = torch.tensor(request.positions, dtype=torch.int64)[kept_T]
    next_tokens = [request.tokens.get(position + 1, UNKNOWN_TOKEN) for position in positions_T.tolist()]
    return RequestRows(
        positions_T=positions_T,
        next_tokens_T=torch.tensor(next_tokens, dtype=torch.int64),
        aux_TX=torch.cat(request.aux)[kept_T],
        hidden_TD=torch.cat(request.hidden)[kept_T],
        num_prompt_tokens=num_prompt_tokens,
        temperature=request.first.temperature,
    )


def _prompt_key(request: _Open, num_prompt_tokens: int) -> str:
    """Only what every copy of the prompt shows: its length and last token. A prefix cache may hide all tokens before.

    Different prompts may share it; they are then held out, or trained on, together.
    """
    return f"{request.first.domain}:{num_prompt_tokens}:{request.tokens.get(num_prompt_tokens - 1)}"
