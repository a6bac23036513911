"""What made an arm's numbers beside its work: commit, machine, versions, model. Pure but for the machine that is asked now."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from loadtest.machine import machine
from loadtest.records import RunRecord
from loadtest.run.conduct import Provenance


def circumstances(record: RunRecord) -> dict[str, str]:
    """Of an arm that ran."""
    return {"model": record.model, **_made_with(record.commit, record.machine, record.versions)}


def why_stale(record: RunRecord | None, provenance: Provenance, directory: Path) -> str | None:
    """Why the arm in `directory` says nothing of this code on this machine, and how to measure it afresh; None where it does.

    The model is not asked for: it is among the settings, and an arm of other settings is none of this work.
    """
    now = _made_with(provenance.commit, machine(), provenance.versions)
    then = {} if record is None else _made_with(record.commit, record.machine, record.versions)
    other = [
        f"{key} {then.get(key, 'unknown')}, now {now.get(key, 'none')}"
        for key in dict.fromkeys((*now, *then))
        if now.get(key) != then.get(key)
    ]
    if not other:
        return None
    return f"measured otherwise ({'; '.join(other)}); to measure it afresh: rm -r {shlex.quote(str(directory))}, then this command again"


def _made_with(commit: str | None, on: Mapping[str, str | int], versions: Mapping[str, str]) -> dict[str, str]:
    return {
        "commit": commit or "unknown",
        **{key: str(value) for key, value in on.items()},
        **{f"version of {name}": version for name, version in versions.items()},
    }
