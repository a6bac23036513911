"""Rows of captured requests, and several of them packed into one batch without padding.

Positions may have gaps: a prefix cache computes no hidden states and a full channel drops messages. Nothing here invents
a row; an anchor is used at a depth only where all rows it needs were captured.

Shape letters: T rows, A anchors, K depths, N rows of one request, M its anchors, D hidden, X aux layers times D.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

UNKNOWN_TOKEN = -1


class NoAnchor(Exception):
    """No request of a batch has a position to learn from or to judge."""


@dataclass(frozen=True)
class RequestRows:
    """The valid rows of one request, by ascending position.

    positions_T [T] int64; next_tokens_T [T] int64: the token at position+1, UNKNOWN_TOKEN where it was not captured;
    aux_TX [T, X] and hidden_TD [T, D] (after the final norm) in the capture dtype.
    """

    positions_T: Tensor
    next_tokens_T: Tensor
    aux_TX: Tensor
    hidden_TD: Tensor
    num_prompt_tokens: int
    temperature: float

    @property
    def num_completion_rows(self) -> int:
        """Rows whose hidden state predicts a completion token."""
        return int((self.positions_T >= self.num_prompt_tokens - 1).sum())


@dataclass(frozen=True)
class RequestBounds:
    """Where one request lies in the batch, and its causal mask as an additive bias [M, N]."""

    row_start: int
    row_end: int
    anchor_start: int
    anchor_end: int
    bias_MN: Tensor


@dataclass(frozen=True)
class Batch:
    """Packed requests. anchors_A are row numbers; anchor a of depth s is scored against row anchors_A[a] + 1 + s."""

    positions_T: Tensor
    next_tokens_T: Tensor
    aux_TX: Tensor
    hidden_TD: Tensor
    anchors_A: Tensor
    valid_KA: Tensor
    bounds: tuple[RequestBounds, ...]

    def to(self, device: torch.device) -> Batch:
        """The same batch where products are computed."""
        return Batch(
            positions_T=self.positions_T.to(device),
            next_tokens_T=self.next_tokens_T.to(device),
            aux_TX=self.aux_TX.to(device),
            hidden_TD=self.hidden_TD.to(device),
            anchors_A=self.anchors_A.to(device),
            valid_KA=self.valid_KA.to(device),
            bounds=tuple(replace(bounds, bias_MN=bounds.bias_MN.to(device)) for bounds in self.bounds),
        )

    def target_rows(self, depth: int) -> Tensor:
        """Row numbers [A] whose hidden state holds the target's prediction at `depth`; clamped where not valid."""
        return (self.anchors_A + 1 + depth).clamp(max=self.positions_T.numel() - 1)


def run_lengths(positions_T: Tensor) -> Tensor:
    """How many rows directly follow each row without a gap, [T] int64."""
    rows_T = torch.arange(positions_T.numel())
    ends_run_T = torch.ones(positions_T.numel(), dtype=torch.bool)
    ends_run_T[:-1] = positions_T[1:] != positions_T[:-1] + 1
    ends = rows_T[ends_run_T]
    return ends[torch.searchsorted(ends, rows_T)] - rows_T


def anchor_rows(request: RequestRows) -> tuple[Tensor, Tensor]:
    """(rows [M] that may serve as anchors, how many depths each is valid for [M]).

    The first anchor is the last prompt row: from there the engine makes its first proposals.
    """
    run_T = run_lengths(request.positions_T)
    is_anchor_T = (request.positions_T >= request.num_prompt_tokens - 1) & (run_T > 0)
    rows_M = is_anchor_T.nonzero().squeeze(1)
    return rows_M, run_T[rows_M]


def pack(requests: Sequence[RequestRows], depth: int, max_context_rows: int | None = None) -> Batch:
    """Pack requests that have at least one anchor; raises NoAnchor where none has.

    max_context_rows cuts the prompt rows before the first anchor to the newest ones.
    """
    pieces: list[tuple[RequestRows, Tensor, Tensor]] = []
    for request in requests:
        rows_M, depths_M = anchor_rows(request)
        if rows_M.numel() == 0:
            continue
        cut = 0 if max_context_rows is None else max(int(rows_M[0]) - max_context_rows, 0)
        pieces.append((_drop_rows(request, cut), rows_M - cut, depths_M))
    if not pieces:
        raise NoAnchor("no request of the batch has an anchor")
    bounds, anchors, valid = [], [], []
    row_start = anchor_start = 0
    for request, rows_M, depths_M in pieces:
        num_rows, num_anchors = request.positions_T.numel(), rows_M.numel()
        bounds.append(
            RequestBounds(
                row_start=row_start,
                row_end=row_start + num_rows,
                anchor_start=anchor_start,
                anchor_end=anchor_start + num_anchors,
                bias_MN=_causal_bias(rows_M, request.next_tokens_T),
            )
        )
        anchors.append(rows_M + row_start)
        valid.append(torch.arange(depth)[:, None] < depths_M)
        row_start, anchor_start = row_start + num_rows, anchor_start + num_anchors
    return Batch(
        positions_T=torch.cat([piece[0].positions_T for piece in pieces]),
        next_tokens_T=torch.cat([piece[0].next_tokens_T for piece in pieces]),
        aux_TX=torch.cat([piece[0].aux_TX for piece in pieces]),
        hidden_TD=torch.cat([piece[0].hidden_TD for piece in pieces]),
        anchors_A=torch.cat(anchors),
        valid_KA=torch.cat(valid, dim=1),
        bounds=tuple(bounds),
    )


def require_tokens(batch: Batch, vocab_size: int) -> None:
    """Raises IndexError for a token id that the target does not have. To be asked in host memory: on a GPU such an index
    ends all computing of the process."""
    largest = int(batch.next_tokens_T.max())
    if largest >= vocab_size:
        raise IndexError(f"token {largest} is not in a vocabulary of {vocab_size}")


def _drop_rows(request: RequestRows, count: int) -> RequestRows:
    if count == 0:
        return request
    return RequestRows(
        positions_T=request.positions_T[count:],
        next_tokens_T=request.next_tokens_T[count:],
        aux_TX=request.aux_TX[count:],
        hidden_TD=request.hidden_TD[count:],
        num_prompt_tokens=request.num_prompt_tokens,
        temperature=request.temperature,
    )


def _causal_bias(rows_M: Tensor, next_tokens_N: Tensor) -> Tensor:
    """0 where an anchor may look, -inf elsewhere: later rows, and rows whose next token (the draft's input) is unknown."""
    rows_N = torch.arange(next_tokens_N.numel())
    visible_MN = (rows_N <= rows_M[:, None]) & (next_tokens_N != UNKNOWN_TOKEN)
    return torch.where(visible_MN, 0.0, float("-inf"))
