"""RequestArchive: remembered requests on disk, one safetensors file each, so that a killed learner remembers them.

Files are not flushed: losing the newest seconds costs nothing. A damaged file is removed, or passed over
where it cannot be; what is read is checked like what an engine sends.

Shape letters: T rows, D hidden, X aux layers times D.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch
from msgspec import Struct
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from drafter.batch import UNKNOWN_TOKEN, RequestRows
from drafter.credit import Outcome
from drafter.draft import DTYPES
from learner.request import CapturedRequest
from wire.frames import MAX_POSITION
from wire.spec import CaptureSpec

log = logging.getLogger(__name__)

_HEADER = "paceline"
_TENSORS = ("positions_T", "next_tokens_T", "aux_TX", "hidden_TD")
_UNREADABLE = (OSError, SafetensorError, msgspec.DecodeError, ValueError, TypeError, KeyError, RuntimeError)
"""RuntimeError covers torch and RecursionError."""


class _Entry(Struct, frozen=True, kw_only=True):
    key: str
    prompt_key: str
    tenant: str
    domain: str
    captured_at_s: float
    num_prompt_tokens: int
    temperature: float
    target_revision: str
    outcomes: list[tuple[int, tuple[int, ...], int, int]]
    """Anchor position, proposed ids, accepted, draft version."""


class RequestArchive:
    """Bounded by its owner: every key the replay forgets must be removed here."""

    def __init__(self, directory: Path, spec: CaptureSpec) -> None:
        self._directory = directory
        self._spec = spec
        self.num_write_errors = 0

    def write(self, request: CapturedRequest) -> None:
        """Keep a request; a full disk is logged once and counted, never raised."""
        path = self._path(request.key)
        temporary = path.with_suffix(".tmp")
        entry = _Entry(
            key=request.key,
            prompt_key=request.prompt_key,
            tenant=request.tenant,
            domain=request.domain,
            captured_at_s=request.captured_at_s,
            num_prompt_tokens=request.rows.num_prompt_tokens,
            temperature=request.rows.temperature,
            target_revision=self._spec.target_revision,
            outcomes=[(at, o.proposed_ids, o.num_accepted, o.draft_version) for at, o in request.outcomes.items()],
        )
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            tensors = {name: getattr(request.rows, name).contiguous() for name in _TENSORS}
            save_file(tensors, temporary, metadata={_HEADER: msgspec.json.encode(entry).decode()})
            temporary.rename(path)
        except (OSError, SafetensorError) as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            self.num_write_errors += 1
            if self.num_write_errors == 1:
                log.warning("cannot keep captured requests on disk, training goes on from memory: %s", error)

    def remove(self, key: str) -> None:
        with contextlib.suppress(OSError):
            self._path(key).unlink(missing_ok=True)

    def read_only(self) -> Iterator[CapturedRequest]:
        """Every usable request, oldest first; nothing on disk changes."""
        for path in sorted(self._directory.glob("*.safetensors"), key=_modified_at_s):
            request = self._read(path)
            if request is not None:
                yield request

    def read_all(self) -> Iterator[CapturedRequest]:
        """Every usable request, oldest first; others are removed."""
        if not self._directory.is_dir():
            return
        for leftover in self._directory.glob("*.tmp"):
            _discard(leftover)
        for path in sorted(self._directory.glob("*.safetensors"), key=_modified_at_s):
            request = self._read(path)
            if request is None:
                _discard(path)
            else:
                yield request

    def _read(self, path: Path) -> CapturedRequest | None:
        """The request of one file; None (logged) where it is damaged, or made from another target."""
        try:
            with safe_open(path, framework="pt") as opened:
                entry = msgspec.json.decode((opened.metadata() or {}).get(_HEADER, ""), type=_Entry)
                if entry.target_revision != self._spec.target_revision:
                    return None
                tensors = {name: opened.get_tensor(name) for name in _TENSORS}
            rows = RequestRows(**tensors, num_prompt_tokens=entry.num_prompt_tokens, temperature=entry.temperature)
            if self._path(entry.key) != path:
                raise ValueError(f"it holds request {entry.key}, which belongs elsewhere")
            _check_entry(entry, self._spec.vocab_size)
            _check_rows(rows, self._spec)
        except _UNREADABLE as error:
            log.warning("dropping a damaged captured request %s: %s", path.name, error)
            return None
        return CapturedRequest(
            key=entry.key,
            prompt_key=entry.prompt_key,
            tenant=entry.tenant,
            domain=entry.domain,
            rows=rows,
            outcomes={at: Outcome(proposed, accepted, version) for at, proposed, accepted, version in entry.outcomes},
            captured_at_s=entry.captured_at_s,
        )

    def _path(self, key: str) -> Path:
        return self._directory / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.safetensors"


def _modified_at_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _discard(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("cannot remove %s, passing over it: %s", path.name, error)


def _check_entry(entry: _Entry, vocab_size: int) -> None:
    """Raises ValueError for numbers that training could not use."""
    if not (math.isfinite(entry.temperature) and math.isfinite(entry.captured_at_s)):
        raise ValueError("temperature or time of capture is not finite")
    if not 0 < entry.num_prompt_tokens < MAX_POSITION:
        raise ValueError(f"{entry.num_prompt_tokens} prompt tokens are impossible")
    for at, proposed_ids, num_accepted, _ in entry.outcomes:
        if not 0 <= num_accepted <= len(proposed_ids) or not all(0 <= token < vocab_size for token in proposed_ids):
            raise ValueError(f"the outcome at position {at} is impossible")


def _check_rows(rows: RequestRows, spec: CaptureSpec) -> None:
    """Raises ValueError for rows that a batch could not be made of."""
    num_rows, dtype = rows.positions_T.numel(), DTYPES[spec.dtype]
    _check_tensor("positions_T", rows.positions_T, (num_rows,), torch.int64)
    _check_tensor("next_tokens_T", rows.next_tokens_T, (num_rows,), torch.int64)
    _check_tensor("aux_TX", rows.aux_TX, (num_rows, len(spec.aux_layer_ids) * spec.hidden_size), dtype)
    _check_tensor("hidden_TD", rows.hidden_TD, (num_rows, spec.hidden_size), dtype)
    if num_rows == 0:
        raise ValueError("it has no rows")
    if rows.positions_T[0] < 0 or rows.positions_T[-1] >= MAX_POSITION or bool((rows.positions_T.diff() <= 0).any()):
        raise ValueError("positions do not ascend from 0 on")
    if rows.next_tokens_T.min() < UNKNOWN_TOKEN or rows.next_tokens_T.max() >= spec.vocab_size:
        raise ValueError(f"token ids are not in a vocabulary of {spec.vocab_size}")


def _check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, needed {dtype} {shape}")
    if not bool(tensor.isfinite().all()):
        raise ValueError(f"{name} is not finite")
