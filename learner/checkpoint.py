"""Checkpoint: everything a restarted learner needs, as one safetensors file with its numbers in the header.

Written aside, flushed, then renamed, so a kill at any moment leaves the old file or the new one.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
from msgspec import Struct
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from learner.wager import Wager
from wire.errors import WireError
from wire.spec import SCHEMA_VERSION, CaptureSpec, fsync_path

log = logging.getLogger(__name__)

_HEADER = "paceline"


class Progress(Struct, frozen=True, kw_only=True):
    """The learner's counters, beside the tensors."""

    schema_version: int = SCHEMA_VERSION
    spec: CaptureSpec
    num_steps: int
    num_tokens_seen: int
    num_tokens_distinct: int
    num_published: int
    num_restores: int
    num_gate_decisions: dict[str, int]
    visits: dict[str, int]
    """Passes over each remembered request, by key."""
    judged_against: int | None = None
    """The version that the evidence is about."""
    wager: Wager | None = None
    num_recounts: int = 0
    champions: dict[str, int] = {}
    """The best version by domain."""


def save_checkpoint(path: Path, tensors: dict[str, Tensor], progress: Progress) -> None:
    """Replace the checkpoint; raises OSError on a full disk and leaves the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    header = {_HEADER: msgspec.json.encode(progress).decode()}
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, metadata=header)
        fsync_path(temporary)
        temporary.rename(path)
    except SafetensorError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(f"cannot write {path.name}: {error}") from error
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    fsync_path(path.parent)


def load_checkpoint(path: Path, spec: CaptureSpec) -> tuple[dict[str, Tensor], Progress] | None:
    """The last checkpoint, or None (with a logged reason) where there is none that fits this target and release."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as opened:
            progress = msgspec.json.decode((opened.metadata() or {}).get(_HEADER, ""), type=Progress)
            if progress.schema_version != SCHEMA_VERSION:
                log.warning("checkpoint has schema %d, this release %d: starting anew", progress.schema_version, SCHEMA_VERSION)
                return None
            # The core is the same with a draft vocabulary of any size.
            spec.require(msgspec.structs.replace(progress.spec, draft_vocab_size=spec.draft_vocab_size), who="the checkpoint")
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, msgspec.DecodeError, WireError, ValueError, RuntimeError) as error:
        log.warning("cannot use the checkpoint, starting anew: %s", error)
        return None
    broken = not_finite(tensors)
    if broken:
        log.warning("the checkpoint holds values that are not finite (%s), starting anew", broken[0])
        return None
    return tensors, progress


def not_finite(tensors: dict[str, Tensor]) -> list[str]:
    """Names of the tensors with a value that is not finite."""
    return [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]
