"""RequestArchive: remembered requests on disk, one safetensors file each, so that a killed learner remembers them.

Files are not flushed: losing the newest seconds costs nothing. A damaged file is removed and counted.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from drafter.batch import RequestRows
from drafter.credit import Outcome
from learner.request import CapturedRequest

log = logging.getLogger(__name__)

_HEADER = "paceline"
_TENSORS = ("positions_T", "next_tokens_T", "aux_TX", "hidden_TD")


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

    def __init__(self, directory: Path, target_revision: str) -> None:
        self._directory = directory
        self._target_revision = target_revision
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
            target_revision=self._target_revision,
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

    def read_all(self) -> Iterator[CapturedRequest]:
        """Every usable request, oldest first; others are removed."""
        if not self._directory.is_dir():
            return
        for leftover in self._directory.glob("*.tmp"):
            leftover.unlink(missing_ok=True)
        paths = sorted(self._directory.glob("*.safetensors"), key=lambda path: path.stat().st_mtime)
        for path in paths:
            request = self._read(path)
            if request is None:
                path.unlink(missing_ok=True)
            else:
                yield request

    def _read(self, path: Path) -> CapturedRequest | None:
        try:
            with safe_open(path, framework="pt") as opened:
                entry = msgspec.json.decode((opened.metadata() or {}).get(_HEADER, ""), type=_Entry)
                tensors = {name: opened.get_tensor(name) for name in _TENSORS}
        except (OSError, SafetensorError, msgspec.DecodeError) as error:
            log.warning("dropping a damaged captured request %s: %s", path.name, error)
            return None
        if entry.target_revision != self._target_revision:
            return None
        return CapturedRequest(
            key=entry.key,
            prompt_key=entry.prompt_key,
            tenant=entry.tenant,
            domain=entry.domain,
            rows=RequestRows(**tensors, num_prompt_tokens=entry.num_prompt_tokens, temperature=entry.temperature),
            outcomes={at: Outcome(proposed, accepted, version) for at, proposed, accepted, version in entry.outcomes},
            captured_at_s=entry.captured_at_s,
        )

    def _path(self, key: str) -> Path:
        return self._directory / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.safetensors"
